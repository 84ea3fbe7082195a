//! Models without a network, for tests and to try out a deployment. A request says how long its computation lasts,
//! and whether it fails: [`echo`] answers in one pass, [`script`] generates sequences.

pub mod echo;
pub mod script;
