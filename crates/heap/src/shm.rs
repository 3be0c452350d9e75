//! Regions in shared memory and the protocol on them.
//!
//! | file | contents |
//! |---|---|
//! | `region` | memfds: create, seal, import, map |
//! | `fork` | detection of mappings that a forked child inherited |
//! | `index_region` | heartbeat page and local index of a node |
//! | `ledger` | cells, counters and touch bits of a client; all ledgers of a node |
//! | `read_counters` | counters of local reads of a client |
//! | `segment` | header table and payload |
//! | `fill` | payload and digests of a record |
//! | `trailer` | tenant, key and attributes, which follow them |
//! | `grant` | grants, and the errors of begin, commit and kill |
//! | `written` | the bytes of a record that have arrived |
//! | `draft` | header and trailer of a record before they are written |
//! | `owner` | one segment: begin, commit, kill, reclaim |
//! | `node_heap` | the node: index region, ledgers, segments, its own pins |
//! | `staging` | a segment of the node's own, into which records are read from disk |
//! | `local` | a client: get in place, claim and fill |
//! | `owned_guards` | the same without lifetimes: readers and guards that keep the heap alive |
//! | `device_slice` | memory of a device that holds the bytes of a segment's records |
//! | `raw_message`, `socket` | messages with descriptors between processes, and their peers' credentials |
//! | `message`, `listener` | handshake of a client |
//! | `error` | failures of connections |
//! | `exit_monitor` | detection of exited clients |

mod device_slice;
mod draft;
mod error;
mod exit_monitor;
mod fill;
mod fork;
mod grant;
mod index_region;
mod ledger;
mod listener;
mod local;
mod message;
mod node_heap;
mod owned_guards;
mod owner;
mod raw_message;
mod read_counters;
mod region;
mod segment;
pub mod socket;
mod staging;
mod trailer;
mod written;

pub use device_slice::{DeviceMemory, DeviceSlice};
pub use error::ShmError;
pub use exit_monitor::{ClientExited, ExitMonitor, ExitMonitorError};
pub use fill::run_parallel;
pub use fork::{PerProcess, ProcessToken};
pub use grant::{
    BeginError, CommitError, FreedSlot, Grant, KillOutcome, PayloadWriter, ReclaimReport, RecordSpec,
    StageError,
};
pub use index_region::{IndexRegion, IndexRegionError, IndexView};
pub use ledger::{
    CLIENTS_MAX, ClientLedger, LANES_PER_LEDGER, LEDGERS_PER_PROCESS_MAX, LedgerError, Ledgers, NodeCells,
    PinSet,
};
pub use listener::{ClientEvent, ShmClient, ShmListener, connect, open_stream, send_segment};
pub use local::{
    AttachError, Guard, LocalHeap, Lookup, Reader, SEGMENTS_MAPPED_MAX, SlotHold, SlotHoldError, WriteClaim,
};
pub use message::{Accepted, ShmMessage};
pub use node_heap::{HeapConfig, NodeClaim, NodeHeap, NodePin};
pub use owned_guards::{
    KernelCell, PendingCommit, SharedClaim, SharedGuard, SharedLookup, SharedReader, SharedSlotHold,
};
pub use owner::Segment;
pub use raw_message::{RawMessage, ShmMessageError};
pub use read_counters::LocalReadStats;
pub use region::{HugePages, Protection, Region, RegionError};
pub use segment::{PayloadMemory, SegmentDescriptor, SegmentError};
pub use staging::{PublishFailure, StagedRecord, Staging, StagingBuffer, StagingUsage};
pub use trailer::Trailer;

#[cfg(test)]
#[path = "../../types/tests/page/mod.rs"]
mod page;

/// Returns the fields of a `repr(C)` struct, to be compared with its table in the documentation.
#[cfg(test)]
macro_rules! fields_of {
    ($struct:ident: $($field:ident),*) => {{
        // Each field extends to the next one: the size of the structs shows that they have no padding.
        let offsets = [$((std::mem::offset_of!($struct, $field), stringify!($field)),)*];
        let ends = offsets.iter().skip(1).map(|&(offset, _)| offset).chain([size_of::<$struct>()]);
        let field = |((offset, name), end): ((usize, &'static str), usize)| {
            moontide_types::record::Field { offset, bytes: end - offset, name }
        };
        offsets.into_iter().zip(ends).map(field).collect::<Vec<_>>()
    }};
}
#[cfg(test)]
pub(crate) use fields_of;
