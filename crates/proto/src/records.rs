//! Fixed records of packed arrays.
//!
//! [`object`]: locations of objects. [`put`]: start and end of a put. [`report`]: contents of a node. [`command`]:
//! commands of a master to a node. [`transfer_op`]: operations of the data plane. They contain no logic; each decoder rejects contradictory fields.

mod command;
mod object;
mod put;
mod report;
mod transfer_op;

pub use command::{
    CommandFlags, CommandKind, CommandResult, CommandStatus, CopyPurpose, CopySource, NodeCommand,
};
pub use object::{Handle, HandleFlags, ObjectEntry, ObjectFlags, Stripe};
pub use put::{CommitEntry, CommitFlags, PutEndEntry, PutEndFlags, PutEntry, VersionedId};
pub use report::{OffloadFlags, OffloadRecord, ReportFlags, ReportRecord};
pub use transfer_op::{OpFlags, OpKind, TransferOp};
