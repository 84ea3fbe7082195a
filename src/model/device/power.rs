//! A GPU's arithmetic, as the driver reports it. Owns no state.

/// With what a GPU multiplies.
#[derive(Debug)]
pub(super) struct Power {
    pub(super) multiprocessors: usize,
    /// The possible speed in f32, in operations per second; none if the driver reports no clock.
    pub(super) possible: Option<f64>,
}
