//! Messages and call names of the etcd v3 API, as far as used here.
//!
//! Written by hand: this is a tenth of the API, and the compilation of etcd's .proto files needs `protoc` at build
//! time. Unused fields are omitted: decoders skip unknown fields.

/// Names of calls.
pub(super) mod call {
    pub(crate) const RANGE: &str = "/etcdserverpb.KV/Range";
    pub(crate) const PUT: &str = "/etcdserverpb.KV/Put";
    pub(crate) const DELETE: &str = "/etcdserverpb.KV/DeleteRange";
    pub(crate) const TXN: &str = "/etcdserverpb.KV/Txn";
    pub(crate) const LEASE_GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
    pub(crate) const LEASE_REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
    pub(crate) const LEASE_KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
    pub(crate) const WATCH: &str = "/etcdserverpb.Watch/Watch";
    pub(crate) const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Header {
    /// Revision of the store at the time of the response.
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    /// Revision of the last change.
    #[prost(int64, tag = "3")]
    pub(super) mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(super) value: Vec<u8>,
    /// Lease with which the key expires; 0 for none.
    #[prost(int64, tag = "6")]
    pub(super) lease: i64,
}

/// Without `serializable`: the read is linearizable.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    /// First key after the range; empty for a single key.
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) lease: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct DeleteRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
}

/// A response whose fields are not used.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct EmptyResponse {}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Operation {
    #[prost(oneof = "operation::Request", tags = "1, 2")]
    pub(super) request: Option<operation::Request>,
}

pub(super) mod operation {
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(crate) enum Request {
        #[prost(message, tag = "1")]
        Range(super::RangeRequest),
        #[prost(message, tag = "2")]
        Put(super::PutRequest),
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Outcome {
    #[prost(message, optional, tag = "1")]
    pub(super) range: Option<RangeResponse>,
}

/// Value of `Compare::target`: revision of the creation.
pub(super) const TARGET_CREATE: i32 = 1;
/// Value of `Compare::target`: revision of the last change.
pub(super) const TARGET_MOD: i32 = 2;

/// Comparison for equality: `result` is 0.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Compare {
    #[prost(int32, tag = "1")]
    pub(super) result: i32,
    #[prost(int32, tag = "2")]
    pub(super) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) key: Vec<u8>,
    #[prost(oneof = "compare::Revision", tags = "5, 6")]
    pub(super) revision: Option<compare::Revision>,
}

pub(super) mod compare {
    #[derive(Clone, Copy, PartialEq, prost::Oneof)]
    pub(crate) enum Revision {
        /// 0: the key does not exist.
        #[prost(int64, tag = "5")]
        Create(i64),
        #[prost(int64, tag = "6")]
        Mod(i64),
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) success: Vec<Operation>,
    #[prost(message, repeated, tag = "3")]
    pub(super) failure: Vec<Operation>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(super) responses: Vec<Outcome>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    pub(super) ttl_seconds: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    pub(super) id: i64,
}

/// Request of a revocation and of a renewal.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LeaseRequest {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LeaseKeepAliveResponse {
    /// 0: the lease has expired.
    #[prost(int64, tag = "3")]
    pub(super) ttl_seconds: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) create: Option<WatchCreate>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct WatchCreate {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) start_revision: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct WatchResponse {
    #[prost(bool, tag = "4")]
    pub(super) canceled: bool,
    /// Not 0: cancelled because this revision and those before are compacted.
    #[prost(int64, tag = "5")]
    pub(super) compact_revision: i64,
    #[prost(string, tag = "6")]
    pub(super) cancel_reason: String,
    /// Events are only counted: the caller reads the current values.
    #[prost(message, repeated, tag = "11")]
    pub(super) events: Vec<EmptyResponse>,
}

#[derive(Clone, PartialEq, prost::Message)]
#[prost(skip_debug)]
pub(super) struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) password: String,
}

impl std::fmt::Debug for AuthenticateRequest {
    /// Omits the password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthenticateRequest").field("name", &self.name).finish_non_exhaustive()
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    pub(super) token: String,
}
