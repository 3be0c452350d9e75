//! [`Registry`]: where masters meet. A small trait, because everything that is decided is decided elsewhere.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use futures_util::future::BoxFuture;
use moontide_types::Term;

use super::document::{Document, Identity, MasterAddresses};

/// By which a document is replaced only if nobody has replaced it meanwhile. Means something to its registry alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub String);

/// What a registry says at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The document; none before the first master.
    pub document: Option<(Token, Document)>,
    /// The masters that live, by number.
    pub members: BTreeMap<u32, MasterAddresses>,
}

/// Why a registry did not do what was asked. All of them may pass by themselves.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// It was not reached, or did not answer in time.
    #[error("cannot reach the registry {address}: {why}; is it running there?")]
    Unreachable {
        /// Which.
        address: String,
        /// Why.
        why: String,
    },
    /// It does not let us.
    #[error("the registry {address} refuses: {why}; check the credentials and what they are allowed to do")]
    Denied {
        /// Which.
        address: String,
        /// What it said.
        why: String,
    },
    /// It holds something that is not ours.
    #[error(
        "the registry {address} holds {what} that cannot be read: {why}; give this cluster a place of its own there"
    )]
    Malformed {
        /// Which.
        address: String,
        /// What.
        what: &'static str,
        /// Why.
        why: String,
    },
}

/// Where masters meet.
///
/// A member lives for its lease from the last renewal on. Times are counted by the registry, or by each observer from when
/// it saw the last renewal; never by comparing clocks of two hosts. Calls end by themselves within a second or two if the
/// registry does not answer.
pub trait Registry: Send + Sync + fmt::Debug {
    /// The cluster's identity: the one that is stored, or `draft`, which then is stored.
    fn identity<'a>(&'a self, draft: &'a Identity) -> BoxFuture<'a, Result<Identity, RegistryError>>;

    /// What it says now. Members and document may be of slightly different times; the document is not older than any
    /// that this process has read or written before.
    fn read(&self) -> BoxFuture<'_, Result<Snapshot, RegistryError>>;

    /// Replaces the document that `token` stands for; without a token there must be none. False: somebody was faster.
    /// After an error it is not known whether it was replaced.
    fn write<'a>(
        &'a self,
        token: Option<&'a Token>,
        document: &'a Document,
    ) -> BoxFuture<'a, Result<bool, RegistryError>>;

    /// Becomes a member under a number that nobody has had before.
    fn join<'a>(
        &'a self,
        number: Term,
        addresses: &'a MasterAddresses,
        lease: Duration,
    ) -> BoxFuture<'a, Result<(), RegistryError>>;

    /// Says that the member lives. False: it is no member any more, and must join under another number.
    fn renew(&self, number: Term) -> BoxFuture<'_, Result<bool, RegistryError>>;

    /// Ends a membership: one's own, or that of a process that is known to be gone.
    fn remove(&self, number: Term) -> BoxFuture<'_, Result<(), RegistryError>>;

    /// Waits until something may have changed since `seen` was read, for `wait` at most. Coming back too early or after
    /// an error does no harm.
    fn changed<'a>(&'a self, seen: &'a Snapshot, wait: Duration) -> BoxFuture<'a, ()>;
}

/// What an error comes down to: libraries wrap what a person wants to know into layers that say nothing.
pub(super) fn root_cause(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&cause| cause.source());
    causes.last().expect("the error itself is one").to_string()
}
