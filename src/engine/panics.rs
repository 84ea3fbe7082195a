//! The one place where a panic of a model or processor is caught. Owns no state.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::model::ForwardError;

/// Runs `call`, and catches its panic.
///
/// # Errors
/// The message of the panic.
pub fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
    })
}

/// Runs a call of the model. A panic fails the batch.
pub(super) fn guarded<T>(call: impl FnOnce() -> Result<T, ForwardError>) -> Result<T, ForwardError> {
    caught(call).unwrap_or_else(|panic| Err(ForwardError::Failed(format!("panic: {panic}"))))
}
