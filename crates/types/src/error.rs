//! [`ErrorCode`]: the stable numbers by which wire, command line and Python name a failure.
//!
//! Every operation has its own error type with facts in it; this is what they all map to at an edge.
//! **A number is never reused and never changes its meaning.**

/// A number that is no error code (from a newer peer, or garbage).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown error code {0}")]
pub struct UnknownErrorCode(pub u32);

macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $retry:literal, $hint:literal;)*) => {
        /// What went wrong, as a stable number.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        #[non_exhaustive]
        pub enum ErrorCode {
            $($(#[$doc])* $name = $number,)*
        }

        impl ErrorCode {
            /// All codes, in ascending order.
            pub const ALL: &[ErrorCode] = &[$(ErrorCode::$name,)*];

            /// The name, as written in logs and exceptions.
            pub const fn name(self) -> &'static str {
                match self { $(ErrorCode::$name => stringify!($name),)* }
            }

            /// Whether the same call may succeed when repeated unchanged, after a pause or elsewhere.
            pub const fn is_retryable(self) -> bool {
                match self { $(ErrorCode::$name => $retry,)* }
            }

            /// What the caller can do about it.
            pub const fn hint(self) -> &'static str {
                match self { $(ErrorCode::$name => $hint,)* }
            }
        }

        impl TryFrom<u32> for ErrorCode {
            type Error = UnknownErrorCode;

            fn try_from(number: u32) -> Result<ErrorCode, UnknownErrorCode> {
                match number {
                    $($number => Ok(ErrorCode::$name),)*
                    other => Err(UnknownErrorCode(other)),
                }
            }
        }
    };
}

error_codes! {
    /// A bug of ours: an invariant did not hold.
    Internal = 1, false, "please report it with the log of the process that said so";
    /// An argument makes no sense.
    InvalidArgument = 2, false, "correct the argument named in the message";
    /// A documented bound was crossed.
    TooLarge = 3, false, "split the request or the object; the message names the bound";
    /// The peer speaks another version or does not know the call.
    Unsupported = 4, false, "run the same release on both sides";
    /// The caller did not prove who it is.
    Unauthenticated = 5, false, "configure this client's credentials";
    /// The caller may not do this.
    PermissionDenied = 6, false, "ask the operator for access to this tenant or call";

    /// There is no such object: a miss.
    NotFound = 100, false, "compute the value and put it";
    /// The object is there already; a put treats this as success.
    AlreadyExists = 101, false, "nothing to do: the object is stored";
    /// Somebody else is writing the object.
    InProgress = 102, true, "try again in a moment, or go on without storing";
    /// Accepted, but not all nodes have confirmed yet.
    Pending = 103, true, "ask again later; the master keeps at it";
    /// What the caller refers to is no longer there in that version.
    Gone = 104, false, "look the object up again";
    /// The object is reserved or being written, and not readable yet.
    NotReady = 105, true, "poll again, or overlap other work";

    /// No room, and nothing could be evicted.
    NoSpace = 200, true, "add memory or lower the watermarks; retry after eviction";
    /// The tenant's quota is used up.
    QuotaExceeded = 201, true, "remove objects of this tenant or raise its quota";
    /// A bounded resource is in use.
    Busy = 202, true, "retry after a pause";
    /// The answer is not known yet.
    Retry = 203, true, "retry after a pause";
    /// The object is leased or pinned and cannot be removed now.
    Leased = 204, true, "wait for the readers, or remove with force";
    /// The reader's lease ran out in the middle of its read.
    LeaseExpired = 205, true, "look the object up again and read faster or with a longer lease";

    /// This master does not host the group.
    WrongMaster = 300, true, "use the newer group map in the answer";
    /// The term is older than one already seen.
    StaleTerm = 301, true, "follow the current master";
    /// The epoch is not the slot's current one.
    StaleEpoch = 302, false, "the reservation is lost: start the put again";
    /// The region was replaced by a newer one.
    StaleGeneration = 303, false, "look the object up again";
    /// The session ended; the node must register again.
    StaleSession = 304, true, "register again";
    /// The range is in use by another object.
    Overlap = 305, false, "start the put again; the master corrects itself from the node's report";
    /// The address lies outside of the region or extent it names.
    OutOfBounds = 306, false, "this is a bug of the caller: addresses come from the master's answer";

    /// The deadline passed.
    DeadlineExceeded = 400, true, "retry with a longer deadline, or treat it as a miss";
    /// Nobody answers there.
    Unreachable = 401, true, "check that the process runs and the address is right";
    /// The connection broke in the middle.
    ConnectionLost = 402, true, "retry; another replica may answer";
    /// The caller gave up.
    Cancelled = 403, false, "nothing to do";

    /// The bytes do not match their digest; they were not returned.
    Corrupt = 500, true, "another replica is tried by itself; look at the node's log if it persists";
    /// The disk answered with an error.
    DiskError = 501, true, "check the disk; the tier goes on reading";
    /// The disk is full.
    DiskFull = 502, true, "free space or lower the tier's limit";
    /// A device or its driver answered with an error.
    DeviceError = 503, false, "run `moontide doctor`, and look at what the driver says";
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.name(), *self as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_ascending_and_round_trip() {
        assert!(ErrorCode::ALL.windows(2).all(|w| (w[0] as u16) < (w[1] as u16)));
        for &code in ErrorCode::ALL {
            assert_eq!(ErrorCode::try_from(code as u32), Ok(code));
            assert!(!code.hint().is_empty());
        }
        assert_eq!(ErrorCode::try_from(0), Err(UnknownErrorCode(0)), "0 is success, not an error");
        assert_eq!(ErrorCode::try_from(99_999), Err(UnknownErrorCode(99_999)));
    }
}
