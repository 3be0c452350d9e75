//! Jobs: removals that visit every object of a group, a few at a time.
//!
//! A job visits only objects that existed when it began: those with a lower or equal epoch. It is done when its objects
//! cannot return:
//!
//! ```text
//!   scan ──▶ confirm: the nodes have killed all that was removed, and what was released before ──▶ done
//!    ▲              │ a node is absent, reports, or could not be reached meanwhile
//!    └──────────────┘ when all nodes have reported or are given up
//! ```

use moontide_types::{Epoch, ErrorCode, ObjectId};
use regex::bytes::{Regex, RegexBuilder};

use crate::group::LocationVersion;
use crate::ids::{RecordRef, TenantIndex};

/// Id of a job within one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// Selection of keys of a tenant.
#[derive(Clone, Debug)]
pub enum JobKind {
    /// Keys with this prefix.
    Prefix(Box<[u8]>),
    /// Keys that match this expression.
    Pattern(Regex),
    /// All keys.
    All,
}

/// The regular expression is invalid, or its compiled form is too large.
#[derive(Clone, Debug, thiserror::Error)]
#[error("invalid pattern: {0}")]
pub struct PatternError(Box<str>);

/// Memory limit of a compiled expression, and again of its lazily built tables: enough for some hundred states of
/// bounded repetition, but not for the gigabytes of `(a{1000}){1000}`.
const PATTERN_MEMORY_BYTES: usize = 1 << 20;

impl JobKind {
    /// Compiles an expression over keys. Matching is linear in the key, and the compiled size is bounded.
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

/// State of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// The job has objects left to visit, or to confirm.
    Running,
    /// The objects are removed, and cannot return.
    Done,
}

/// Progress of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobStatus {
    /// State of the job.
    pub state: JobState,
    /// Objects visited in the current scan.
    pub scanned: u64,
    /// Objects removed.
    pub removed: u64,
    /// Objects kept because they were leased, pinned or being written, or because too many removals wait for absent nodes.
    pub kept: u64,
    /// `Pending` while the job waits for absent nodes.
    pub code: Option<ErrorCode>,
}

/// Step of a running job.
#[derive(Debug)]
pub(crate) enum JobStep {
    Scan,
    /// Waits until nodes have confirmed the kills of the job, and of these versions, which were released before: a node
    /// may still have them, and their keys are not known any more.
    Confirm(Vec<(ObjectId, LocationVersion)>),
}

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) kind: JobKind,
    pub(crate) tenant: TenantIndex,
    pub(crate) force: bool,
    /// Objects with a higher epoch were created after the job.
    pub(crate) newest: Epoch,
    pub(crate) cursor: Option<RecordRef>,
    pub(crate) step: JobStep,
    /// Removals that nodes have not answered.
    pub(crate) unanswered: u64,
    /// Whether, during the current scan, no node was absent that may return with objects.
    pub(crate) is_certain: bool,
    pub(crate) status: JobStatus,
}

impl Job {
    pub(crate) fn new(kind: JobKind, tenant: TenantIndex, force: bool, newest: Epoch) -> Job {
        let status = JobStatus { state: JobState::Running, scanned: 0, removed: 0, kept: 0, code: None };
        let (cursor, step) = (None, JobStep::Scan);
        Job { kind, tenant, force, newest, cursor, step, unanswered: 0, is_certain: true, status }
    }

    /// Whether the job removes the same objects as one that is asked for.
    pub(crate) fn is_for(&self, tenant: TenantIndex, kind: &JobKind, force: bool) -> bool {
        let same_kind = match (&self.kind, kind) {
            (JobKind::Prefix(own), JobKind::Prefix(other)) => own == other,
            (JobKind::Pattern(own), JobKind::Pattern(other)) => own.as_str() == other.as_str(),
            (JobKind::All, JobKind::All) => true,
            _ => false,
        };
        same_kind && (self.tenant, self.force) == (tenant, force)
    }

    /// Begins another scan.
    pub(crate) fn scan_again(&mut self) {
        self.status = JobStatus { scanned: 0, kept: 0, code: None, ..self.status };
        (self.cursor, self.step, self.is_certain) = (None, JobStep::Scan, true);
    }

    /// Notes that objects of the job may return.
    pub(crate) fn is_uncertain(&mut self) {
        self.is_certain = false;
        self.status.code = Some(ErrorCode::Pending);
    }
}

/// Number of finished jobs whose status can still be queried; older ones are dropped.
pub(crate) const JOBS_REMEMBERED: usize = 256;

/// Maximum number of running jobs: each tick visits all of them.
pub(crate) const JOBS_RUNNING_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_pattern_matches_bytes_and_rejects_oversized_regex() {
        assert!(JobKind::pattern("^user-[0-9]+/").unwrap().matches(b"user-17/x"));
        assert!(!JobKind::pattern("^user-[0-9]+/").unwrap().matches(b"user-/x"));
        assert!(JobKind::pattern("(").is_err());
        assert!(JobKind::pattern("((a{1000}){1000}){1000}").is_err(), "too large");
        assert!(JobKind::pattern(r"\xff").unwrap().matches(&[0xff]), "keys are bytes, not text");
    }
}
