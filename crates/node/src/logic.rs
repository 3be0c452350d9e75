//! Decisions of a node as pure code: no clock, no I/O, no lock and no runtime. Time and the results of heap calls are
//! arguments; the actions to take are return values.
//!
//! Reading order: [`segment_plan`] (number and size of segments), [`groups`] (groups of segments), [`usage`] (space per
//! state), [`commands`] (effect of a master's command), [`outbox`] and [`report`] (messages to a master and their
//! order), [`access`] (access marks), [`timing`] (intervals and backoff), [`batch`] (batches and rate of disk writes),
//! [`notice`] (disk notices and their subscribers), [`flush`] (end of a flush), [`sync_marks`] (proof of being in sync, for later masters).

pub(crate) mod access;
pub(crate) mod batch;
pub(crate) mod commands;
pub(crate) mod flush;
pub(crate) mod groups;
pub(crate) mod notice;
pub(crate) mod outbox;
pub(crate) mod report;
pub(crate) mod segment_plan;
pub(crate) mod sync_marks;
pub(crate) mod timing;
pub(crate) mod usage;
