//! [`UcxVersion`], and the oldest versions that this crate needs.

use std::fmt;

/// Version of UCX, `major.minor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UcxVersion {
    /// Major version; 1 in all releases so far.
    pub major: u16,
    /// Minor version. Patch releases do not change the parts that this crate uses.
    pub minor: u16,
}

impl fmt::Display for UcxVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Oldest UCX on which the engine is enabled. Older ones load, for tests.
pub const MIN_FOR_USE: UcxVersion = UcxVersion { major: 1, minor: 19 };

/// Oldest version in which an endpoint can report its transports.
pub(super) const MIN_FOR_TRANSPORTS: UcxVersion = UcxVersion { major: 1, minor: 14 };
