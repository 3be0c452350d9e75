//! Hash tables. Those of a simulated world hash with a key that follows from its seed, so that the order of iteration is
//! part of what the seed determines.

#[cfg(sim)]
pub use crate::sim::{HashMap, HashSet};
#[cfg(not(sim))]
pub use hashbrown::{HashMap, HashSet};
