//! Hash tables.

pub use hashbrown::{HashMap, HashSet};
