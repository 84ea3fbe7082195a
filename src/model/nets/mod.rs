//! Networks: from inputs to numbers. They know no requests; the `tasks` know those.

mod block;
pub mod decoder;
mod fitness;
pub mod image;
pub mod text;

use candle_core::DType;

use super::Dtype;

fn candle_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::F32,
        Dtype::Bf16 => DType::BF16,
        Dtype::F16 => DType::F16,
    }
}
