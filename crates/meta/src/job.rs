//! Jobs: removals that have to look at every object of a group, a few at a time.
//!
//! A job visits only objects that were there when it began: those of a lower or equal epoch.

use moontide_types::{Epoch, ErrorCode};
use regex::bytes::{Regex, RegexBuilder};

use crate::slab::Ref;
use crate::tenant::TenantIx;

/// Names a job within one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// Which keys of a tenant are meant.
#[derive(Clone, Debug)]
pub enum JobKind {
    /// Those with a prefix.
    Prefix(Box<[u8]>),
    /// Those that an expression matches.
    Pattern(Regex),
    /// All.
    All,
}

/// The expression is none, or would become too large.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the expression cannot be used: {0}")]
pub struct PatternError(Box<str>);

/// Memory that a compiled expression may take, and its lazily built tables as well: some hundred states of bounded
/// repetition, and not the gigabytes that `(a{1000}){1000}` asks for.
const PATTERN_MEMORY_BYTES: usize = 1 << 20;

impl JobKind {
    /// An expression over keys. Its run time is linear in the key, and its size is bounded.
    pub fn pattern(pattern: &str) -> Result<JobKind, PatternError> {
        RegexBuilder::new(pattern)
            .unicode(false)
            .size_limit(PATTERN_MEMORY_BYTES)
            .dfa_size_limit(PATTERN_MEMORY_BYTES)
            .build()
            .map(JobKind::Pattern)
            .map_err(|error| PatternError(error.to_string().into()))
    }

    pub(crate) fn matches(&self, key: &[u8]) -> bool {
        match self {
            JobKind::Prefix(prefix) => key.starts_with(prefix),
            JobKind::Pattern(pattern) => pattern.is_match(key),
            JobKind::All => true,
        }
    }
}

/// What a job is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// It goes on.
    Running,
    /// All done.
    Done,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobStatus {
    /// What it is doing.
    pub state: JobState,
    /// Objects looked at.
    pub scanned: u64,
    /// Objects removed.
    pub removed: u64,
    /// Objects that were leased, pinned or being written, and stayed.
    pub kept: u64,
    /// `Pending` if some node could not be reached.
    pub code: Option<ErrorCode>,
}

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) kind: JobKind,
    pub(crate) tenant: TenantIx,
    pub(crate) force: bool,
    /// Objects with a higher epoch came after the job.
    pub(crate) newest: Epoch,
    pub(crate) cursor: Option<Ref>,
    pub(crate) status: JobStatus,
}

/// Finished jobs that are remembered, so that their callers can ask; older ones are forgotten.
pub(crate) const JOBS_REMEMBERED: usize = 256;

/// Jobs that may run at a time: each is looked at in every tick.
pub(crate) const JOBS_RUNNING_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_bounded() {
        assert!(JobKind::pattern("^user-[0-9]+/").unwrap().matches(b"user-17/x"));
        assert!(!JobKind::pattern("^user-[0-9]+/").unwrap().matches(b"user-/x"));
        assert!(JobKind::pattern("(").is_err());
        assert!(JobKind::pattern("((a{1000}){1000}){1000}").is_err(), "too large");
        assert!(JobKind::pattern(r"\xff").unwrap().matches(&[0xff]), "keys are bytes, not text");
    }
}
