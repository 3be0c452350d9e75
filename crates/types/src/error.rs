//! [`ErrorCode`]: stable numbers of failures on the wire, at the command line and in Python.
//!
//! Every operation has its own error type with details; all of them map to these codes at an API boundary.
//! **A number is never reused and never changes its meaning.**

/// A number that is no error code: from a newer peer, or invalid data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown error code {0}")]
pub struct UnknownErrorCode(pub u32);

macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $retry:literal, $hint:literal;)*) => {
        /// Stable number of a failure.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        #[non_exhaustive]
        pub enum ErrorCode {
            $($(#[$doc])* $name = $number,)*
        }

        impl ErrorCode {
            /// All codes, in ascending order.
            pub const ALL: &[ErrorCode] = &[$(ErrorCode::$name,)*];

            /// Returns the name, as written in logs and exceptions.
            pub const fn name(self) -> &'static str {
                match self { $(ErrorCode::$name => stringify!($name),)* }
            }

            /// Returns whether the same call may succeed later, or with another master or replica.
            pub const fn is_retryable(self) -> bool {
                match self { $(ErrorCode::$name => $retry,)* }
            }

            /// Returns the action that the caller can take.
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
    /// A bug in Moontide: an invariant did not hold.
    Internal = 1, false, "report it with the log of the process that returned it";
    /// An argument is invalid.
    InvalidArgument = 2, false, "correct the argument named in the message";
    /// A documented limit is exceeded, or the object never fits into the memory of the nodes.
    TooLarge = 3, false, "split the request or the object; the message names the limit";
    /// The peer uses another protocol version or does not implement the call.
    Unsupported = 4, false, "run the same release on both sides";
    /// The credentials of the caller are missing or invalid.
    Unauthenticated = 5, false, "configure this client's credentials";
    /// The caller has no permission for this call.
    PermissionDenied = 6, false, "ask the operator for access to this tenant or call";

    /// The object does not exist: a miss.
    NotFound = 100, false, "compute the value and put it";
    /// The object exists already; a put treats this as success.
    AlreadyExists = 101, false, "nothing to do: the object is stored";
    /// Another client is writing the object.
    InProgress = 102, true, "retry after a pause, or continue without the put";
    /// The master accepted the call, but not all nodes have confirmed it yet.
    Pending = 103, true, "the change is made, but a node that has not confirmed it may undo it; repeat the call to be certain";
    /// The version that the caller refers to no longer exists.
    Gone = 104, false, "look the object up again";
    /// The object is reserved or being written, and not readable yet.
    NotReady = 105, true, "poll again, or do other work in the meantime";

    /// No space is left, and eviction could not free any.
    NoSpace = 200, true, "add memory or lower the watermarks; retry after eviction";
    /// The tenant's quota is used up.
    QuotaExceeded = 201, true, "remove objects of this tenant or raise its quota";
    /// A bounded resource is in use.
    Busy = 202, true, "retry after a pause";
    /// The result is not known yet.
    Retry = 203, true, "retry after a pause";
    /// The object is leased or pinned and cannot be removed now.
    Leased = 204, true, "wait for the readers, or remove with force";
    /// The reader's lease expired during its read.
    LeaseExpired = 205, true, "look the object up again and read faster or with a longer lease";
    /// Too many tenants have objects.
    TooManyTenants = 206, true, "remove all objects of tenants that are no longer used, or use fewer names";

    /// This master does not host the group.
    WrongMaster = 300, true, "use the newer group map in the response";
    /// The term is older than the latest known term.
    StaleTerm = 301, true, "follow the current master";
    /// The epoch is not the slot's current one.
    StaleEpoch = 302, false, "the reservation is lost: start the put again";
    /// The region was replaced by a newer one.
    StaleGeneration = 303, false, "look the object up again";
    /// The session ended; the node must register again.
    StaleSession = 304, true, "register again";
    /// The range is in use by another object.
    Overlap = 305, false, "start the put again; the master corrects itself from the node's report";
    /// The address lies outside of its region or extent.
    OutOfBounds = 306, false, "this is a bug of the caller: addresses come from the master's response";

    /// The deadline passed.
    DeadlineExceeded = 400, true, "retry with a longer deadline, or treat it as a miss";
    /// No process responds at the address.
    Unreachable = 401, true, "check that the process runs and the address is right";
    /// The connection was lost during the call.
    ConnectionLost = 402, true, "retry; another replica may answer";
    /// The caller cancelled the call.
    Cancelled = 403, false, "nothing to do";

    /// The bytes do not match their digest; they were not returned.
    Corrupt = 500, true, "other replicas are tried automatically; check the node's log if it persists";
    /// The disk returned an error.
    DiskError = 501, true, "check the disk; the tier keeps serving reads";
    /// The disk is full.
    DiskFull = 502, true, "free space or lower the tier's limit";
    /// A device or its driver returned an error.
    DeviceError = 503, false, "run `moontide doctor` and check the driver's message";
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
    fn error_codes_are_unique_ascending_and_round_trip() {
        assert!(ErrorCode::ALL.windows(2).all(|w| (w[0] as u16) < (w[1] as u16)));
        for &code in ErrorCode::ALL {
            assert_eq!(ErrorCode::try_from(code as u32), Ok(code));
            assert!(!code.hint().is_empty());
        }
        assert_eq!(ErrorCode::try_from(0), Err(UnknownErrorCode(0)), "0 is success, not an error");
        assert_eq!(ErrorCode::try_from(99_999), Err(UnknownErrorCode(99_999)));
    }
}
