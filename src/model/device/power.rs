//! What a GPU says of its arithmetic. Owns no state.

/// With what a GPU multiplies.
#[derive(Debug)]
pub(super) struct Power {
    pub(super) multiprocessors: usize,
    /// What they could compute in f32, in operations a second; none where the driver names no clock.
    pub(super) possible: Option<f64>,
}
