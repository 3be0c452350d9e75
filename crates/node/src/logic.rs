//! Decisions of a node as pure code: no clock, no I/O, no lock and no runtime. Time and the results of heap calls are
//! arguments; the actions to take are return values.
//!
//! Reading order: [`segment_plan`] (number and size of segments), [`groups`] (groups of segments), [`usage`] (space per
//! state), [`commands`] (effect of a master's command), [`outbox`] and [`report`] (messages to a master and their
//! order), [`access`] (access marks), [`timing`] (intervals and backoff), [`batch`] (batches and rate of disk writes),
//! [`notice`] (disk notices and their subscribers), [`flush`] (end of a flush), [`sync_marks`] (proof of being in sync, for later masters).

pub mod access;
pub mod batch;
pub mod commands;
pub mod flush;
pub mod groups;
pub mod notice;
pub mod outbox;
pub mod report;
pub mod segment_plan;
pub mod sync_marks;
pub mod timing;
pub mod usage;
