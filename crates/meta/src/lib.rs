//! Metadata of one group as a state machine: commands in, effects out.
//!
//! A [`Group`] knows the locations of all objects of its share of the key space, grants space and leases, and chooses
//! eviction victims. It is one value without locks. Time and randomness are arguments. Actions that the caller must
//! perform are returned as [`Effect`]s. A test can therefore run years of crashes in a second, and a master can run as
//! many groups as it has cores.
//!
//! No call is proportional to the number of objects, except `Group::audit`. Work that visits many objects (a lost
//! node, removal by prefix, eviction) proceeds in steps with a budget, from [`Group::tick`].
//!
//! Reading order: [`Now`], [`Effect`] and [`NodeCommand`], [`Group`] with its calls (lookup, put, remove), then the
//! calls for nodes (mount, report, command results), eviction, jobs. The parts are below them: the record of an object,
//! the slab that stores all records, the table that finds them, segments, placement.
//!
//! # Example: a put, a get and a removal
//!
//! ```
//! use std::num::NonZeroU16;
//! use std::time::Duration;
//!
//! use moontide_meta::*;
//! use moontide_types::record::PinClass;
//! use moontide_types::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A group in term 1. The caller passes the time and gets the effects in a list.
//! let now = Now { mono: MonoTime(0), unix: UnixMillis(1_800_000_000_000) };
//! let mut effects = Effects::new();
//! let config = GroupConfig::new(GroupId(0), NonZeroU16::MIN, Term::new(1)?);
//! let mut group = Group::new(config, now);
//! let tenant = group.tenant(Tenant::DEFAULT).map_err(|code| code.name())?;
//!
//! // A node registers a segment of 1,000 units (500 KiB) and 100 slots, without records in it.
//! let (node, segment) = (NodeId(7), SegmentId(0));
//! let mount = MountSpec {
//!     node,
//!     session: SessionId(1),
//!     segment,
//!     generation: Generation(1),
//!     medium: Medium::Memory,
//!     units: 1000,
//!     slots: 100,
//!     labels: ["", "", ""],
//!     tenant: None,
//!     term: Term::ZERO,
//!     has_records: false,
//!     synced: SyncMark::NONE,
//!     one_sided: false,
//! };
//! group.mount(now, &mount, &mut effects).map_err(|code| code.name())?;
//!
//! // PutStart reserves a slot and an extent. The client then writes to the node; the group sees none of the bytes.
//! let key = Key::new(b"prefix-0001")?;
//! let id = IdKey::new(1, [9; 32]).object_id(Tenant::DEFAULT, TenantGeneration(0), key);
//! let object = LookupKey { id, key };
//! let put = PutStart {
//!     object,
//!     tenant,
//!     caller: 1,
//!     object_len: 1024,
//!     attributes_len: 0,
//!     pin: PinClass::None,
//!     spread: None,
//!     disk_replicas: 0,
//!     expires: None,
//!     cohort: None,
//!     parent: None,
//!     options: &PutOptions::default(),
//! };
//! let reserved = group.put_start(now, &put, &mut effects).map_err(|code| code.name())?;
//! let (epoch, slot) = (reserved.object.epoch, reserved.object.locations[0].slot);
//!
//! // Readers find the object after PutEnd, which carries the root of its digests.
//! group.lookup(now, 0, &[object], |_, found| assert_eq!(found.err(), Some(ErrorCode::NotReady)));
//! let end = PutEnd { id, epoch, root: 77, outcomes: &[None], stripe_roots: &[], replaces: false };
//! group.put_end(now, &end, &mut effects).map_err(|code| code.name())?;
//! group.lookup(now, 0, &[object], |_, found| {
//!     let found = found.expect("the put has ended");
//!     assert_eq!((found.locations[0].node, found.root), (node, 77));
//! });
//!
//! // A removal is complete when the node has killed the record: the group asks for it and waits.
//! assert!(effects.is_empty());
//! let outcome = group.remove(now, &object, false, WaiterId(5), &mut effects);
//! assert_eq!(outcome, RemoveOutcome::Waiting);
//! let sent = effects.drain(..).next();
//! assert!(matches!(sent, Some(Effect::Command { command, .. }) if command.kind == CommandKind::Kill));
//! let accepted = CommandOutcome::Accepted;
//! group.command_outcome((node, segment), CommandKind::Kill, slot, epoch, accepted, &mut effects);
//! assert!(effects.contains(&Effect::Removed { waiter: WaiterId(5), code: None }));
//! group.audit(now).map_err(|violation| violation.to_string())?;
//! # Ok(())
//! # }
//! ```
//!
//! Invariants, checked by `Group::audit` (feature `testing`, for tests and the simulation):
//!
//! * Extents of a segment never overlap, and `live + reserved + draining + free = units`.
//! * An extent is free again only after its node has reported it as free.
//! * A leased extent is not reclaimed before the lease has ended.
//! * The bytes of all tenants sum to the live and reserved bytes of all segments.

#![forbid(unsafe_code)]

mod effect;
mod time;

mod group;

mod cohort;
mod eviction;
mod ids;
mod job;
mod placement;
mod queue;
mod record;
mod record_extension;
mod segment;
mod segment_sizes;
mod sessions;
mod sketch;
mod slab;
mod table;
mod tenant;

pub use effect::{
    CommandKind, CommandOutcome, CopyPurpose, CopySource, Effect, Effects, NodeCommand, WaiterId,
};
pub use eviction::EvictionTrials;
pub use group::{
    Admission, DiskSpec, DrainMode, EvictReport, ExpectedSegment, FlushProgress, Group, GroupConfig,
    GroupHandoff, GroupStats, HandoffObject, INVALIDATIONS_KEPT, Invalidations, ListCursor, LookupCounts,
    LookupKey, LookupResult, MountOutcome, MountSpec, NodeKey, ObjectDetail, ObjectView, OffloadTrigger,
    PutEnd, PutOptions, PutStart, RemoteReads, RemoveOutcome, ReportRecord, ReportState, Reservation,
    SegmentView, StripeLocation, StripeRange, SyncMark, TickBudget,
};
#[cfg(any(test, feature = "testing"))]
pub use group::{Audit, AuditedExtent, Violation};
pub use ids::TenantIndex;
pub use job::{JobId, JobKind, JobState, JobStatus, PatternError};
pub use placement::{Placement, PlacementKind, PlacementRequest, ReplicaSite, SegmentCandidate, Topology};
pub use segment::SegmentPhase;
pub use sessions::{HeartbeatOutcome, NodeTaken, OpenedSession, SessionConfig, SessionInfo, Sessions};
pub use tenant::{Quota, TENANTS_MAX, TenantUsage};
pub use time::Now;
