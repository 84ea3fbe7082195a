//! Networks: from inputs to numbers. They know no requests; the `tasks` know those.

pub mod text;
