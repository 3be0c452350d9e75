//! The fixed records that messages carry packed, by what they are about.
//!
//! [`object`]: where objects are. [`put`]: how a put ends. [`report`]: what a node has. [`order`]: what a node
//! shall do. None of them decides anything; each refuses numbers that contradict each other.

mod object;
mod order;
mod put;
mod report;

pub use object::{Handle, HandleFlags, Medium, ObjectEntry, ObjectFlags, Stripe};
pub use order::{Order, OrderFlags, OrderKind, OrderPhase, OrderResult};
pub use put::{CommitEntry, CommitFlags, PutEndEntry, PutEntry, VersionedId};
pub use report::{OffloadFlags, OffloadRecord, ReportFlags, ReportRecord};
