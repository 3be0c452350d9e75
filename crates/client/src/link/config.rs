//! [`LinkConfig`]: settings of a link. [`MasterHint`]: map version and term that its calls send. [`LinkLoad`]: its
//! current load.

use std::sync::Arc;
use std::time::Duration;

use moontide_auth::Credentials;
use moontide_proto::Token;
use moontide_proto::convert::{CallerId, ConvertError, RequestContext};
use moontide_proto::limits::TIMEOUT_MS_MAX;
use moontide_rt::time::Instant;
use moontide_types::{MapVersion, Tenant, Term};

use super::error::LinkError;

/// Default timeout of a call. A cache that takes longer to respond is slower than computing.
pub const TIMEOUT_MS_DEFAULT: u32 = 5_000;

/// Default timeout of connecting, including name resolution and handshake.
pub const CONNECT_MS_DEFAULT: u32 = 3_000;

/// Default number of requests in flight on one link: enough to cover the round trip, few enough for a master that
/// serves thousands of clients.
pub const INFLIGHT_DEFAULT: u16 = 64;

/// Upper limit of `inflight_max`: a request number has 8 bits for its index in the table.
pub const INFLIGHT_MAX: u16 = 256;

/// Settings of a link.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// Address of the master's framed protocol, `host:port`.
    pub address: String,
    /// Id of the calling process.
    pub caller: CallerId,
    /// Token that authenticates the caller.
    pub token: Token,
    /// Certificate of this process; `None`: the connection is not encrypted.
    pub credentials: Option<Arc<Credentials>>,
    /// Timeout of calls without their own context: 1 to [`TIMEOUT_MS_MAX`].
    pub timeout_ms: u32,
    /// Timeout of connecting: 1 to [`TIMEOUT_MS_MAX`]. A call that must connect waits no longer than its own deadline.
    pub connect_timeout_ms: u32,
    /// Most requests in flight: 1 to [`INFLIGHT_MAX`]. The master may grant fewer.
    pub inflight_max: u16,
}

impl LinkConfig {
    /// Creates settings with this address and caller and defaults for everything else.
    pub fn new(address: impl Into<String>, caller: CallerId) -> LinkConfig {
        LinkConfig {
            address: address.into(),
            caller,
            token: Token::NONE,
            credentials: None,
            timeout_ms: TIMEOUT_MS_DEFAULT,
            connect_timeout_ms: CONNECT_MS_DEFAULT,
            inflight_max: INFLIGHT_DEFAULT,
        }
    }

    /// Checks every number against its limits.
    pub fn validate(&self) -> Result<(), LinkError> {
        within("timeout_ms", self.timeout_ms, TIMEOUT_MS_MAX)?;
        within("connect_timeout_ms", self.connect_timeout_ms, TIMEOUT_MS_MAX)?;
        within("inflight_max", self.inflight_max.into(), INFLIGHT_MAX.into())?;
        Ok(())
    }

    /// Returns the context of a call on keys of any groups.
    pub(super) fn context<'a>(
        &self,
        tenant: Tenant<'a>,
        hint: MasterHint,
        timeout_ms: u32,
    ) -> RequestContext<'a> {
        RequestContext {
            tenant,
            group: None,
            map_version: hint.map_version,
            term: hint.term,
            caller: self.caller,
            session: None,
            timeout_ms,
            token: self.token,
        }
    }

    /// Returns the deadline of a call that starts now; at most `until`, if the caller has a deadline of its own.
    pub(super) fn deadline(&self, until: Option<Instant>) -> Deadline {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()).as_millis());
        let ms = left.map_or(self.timeout_ms, |left| left.clamp(1, self.timeout_ms.into()) as u32); // clamped
        Deadline::after(ms)
    }

    /// Returns the deadline of a connect that starts now: at most the deadline of the call that needs it.
    pub(super) fn connect_until(&self, deadline: Option<Deadline>) -> Instant {
        let own = Deadline::after(self.connect_timeout_ms).at;
        deadline.map_or(own, |deadline| own.min(deadline.at))
    }
}

/// Checks `1 ≤ found ≤ max`.
pub(super) fn within(field: &'static str, found: u32, max: u32) -> Result<(), ConvertError> {
    if found == 0 {
        return Err(ConvertError::TooSmall { field, found: 0, min: 1 });
    }
    if found > max {
        return Err(ConvertError::TooLarge { field, found: found.into(), max: max.into() });
    }
    Ok(())
}

/// Map version and term of the master, sent in the context of the calls that the link itself builds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MasterHint {
    /// Version of the group map by which the master was chosen; 0 if there was none.
    pub map_version: MapVersion,
    /// Term of the master; zero if unknown.
    pub term: Term,
}

/// Load of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkLoad {
    /// Requests in flight.
    pub in_flight: usize,
    /// Single keys that wait for a batch in flight to return.
    pub queued_keys: usize,
}

/// End of a wait, with its length in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    pub(super) at: Instant,
    pub(super) ms: u32,
}

impl Deadline {
    pub(super) fn after(ms: u32) -> Deadline {
        Deadline { at: Instant::now() + Duration::from_millis(ms.into()), ms }
    }

    /// Returns the time left; `None` if there is none.
    pub(super) fn remaining(self) -> Option<Duration> {
        self.at.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }

    /// Returns the error of a call that timed out.
    pub(super) fn error(self, address: &Arc<str>) -> LinkError {
        LinkError::Deadline { address: address.clone(), deadline_ms: self.ms }
    }
}
