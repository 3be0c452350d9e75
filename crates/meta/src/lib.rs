//! One group's metadata as a state machine: commands in, effects out.
//!
//! A [`Group`] knows where every object of its share of the key space is, grants space and leases, and decides what
//! is evicted. It is one value with no lock in it and none around it that it knows of. Time and randomness are
//! arguments; what the world has to do about a command comes back as [`Effect`]s. So a test can run years of
//! crashes in a second, and a master can run as many groups as it has cores.
//!
//! Nothing here is proportional to the number of objects, except [`Group::audit`]; what has to visit many objects
//! (a lost node, removal by prefix, eviction) goes on in steps with a budget, from [`Group::tick`].
//!
//! Reading order: [`Now`], [`Effect`] and [`Order`], [`Group`] with its calls (lookup, put, remove), then the
//! nodes' side (mount, report, order results), eviction, jobs; below them the parts: the record of an object, the
//! slab that holds all of them, the table that finds them, segments, placement.
//!
//! Invariants, checked by [`Group::audit`]:
//!
//! * extents of a segment never overlap, and `live + reserved + draining + free = units`;
//! * a range is free again only after its node said so;
//! * a leased range is not reclaimed before the lease has ended;
//! * the bytes of all tenants sum to the live and reserved bytes of all segments.

#![forbid(unsafe_code)]

mod effect;
mod time;

mod group;

mod cohort;
mod extra;
mod job;
mod placement;
mod queue;
mod random;
mod record;
mod segment;
mod sessions;
mod sizes;
mod sketch;
mod slab;
mod table;
mod tenant;

pub use effect::{Effect, Effects, Order, OrderKind, OrderOutcome, Waiter};
pub use group::{
    Admission, Ask, Audit, DEPARTURES_KEPT, Departures, Detail, DiskSpec, EvictReport, ExpectedSegment,
    Found, Group, GroupConfig, GroupStats, Heirloom, Inheritance, ListCursor, LookupCounts, Mount, MountSpec,
    ObjectView, PlaceView, PutEnd, PutOptions, PutStart, Range, Removal, ReportRecord, ReportState,
    Reservation, SegmentView, StripeView, TickBudget, Violation,
};
pub use job::{JobId, JobKind, JobState, JobStatus, PatternError};
pub use placement::{Candidate, Place as PlacementPlace, Placement, PlacementKind, Topology, Wish};
pub use random::Rng;
pub use segment::{Medium, SegmentPhase};
pub use sessions::{Beat, SessionConfig, SessionInfo, Sessions};
pub use tenant::{Quota, TenantIx, TenantUsage};
pub use time::Now;
