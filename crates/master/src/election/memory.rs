//! A registry that is a value: for tests, and for the simulation. It keeps every promise of [`Registry`] and survives nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use moontide_types::{Clock, MonoTime, SystemClock, Term};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::document::{Document, Identity, MasterAddresses};
use super::registry::{Registry, RegistryError, Snapshot, Token};

/// What a registry holds. Time is an argument.
#[derive(Clone, Debug, Default)]
pub struct Board {
    identity: Option<Identity>,
    document: Option<Document>,
    members: BTreeMap<u32, Member>,
}

#[derive(Clone, Debug)]
struct Member {
    addresses: MasterAddresses,
    lease: Duration,
    until: MonoTime,
}

impl Board {
    /// As [`Registry::identity`].
    pub fn identity(&mut self, draft: &Identity) -> Identity {
        self.identity.get_or_insert_with(|| draft.clone()).clone()
    }

    /// As [`Registry::read`].
    pub fn read(&mut self, now: MonoTime) -> Snapshot {
        self.members.retain(|_, member| member.until > now);
        let token = |document: &Document| Token(document.version.to_string());
        Snapshot {
            document: self.document.as_ref().map(|document| (token(document), document.clone())),
            members: self.members.iter().map(|(&number, m)| (number, m.addresses.clone())).collect(),
        }
    }

    /// As [`Registry::write`].
    pub fn write(&mut self, token: Option<&Token>, document: &Document) -> bool {
        let current = self.document.as_ref().map(|document| Token(document.version.to_string()));
        let may = current.as_ref() == token;
        if may {
            self.document = Some(document.clone());
        }
        may
    }

    /// As [`Registry::join`].
    pub fn join(&mut self, now: MonoTime, number: Term, addresses: &MasterAddresses, lease: Duration) {
        let member = Member { addresses: addresses.clone(), lease, until: now.after(lease) };
        self.members.insert(number.get(), member);
    }

    /// As [`Registry::renew`].
    pub fn renew(&mut self, now: MonoTime, number: Term) -> bool {
        match self.members.get_mut(&number.get()).filter(|member| member.until > now) {
            Some(member) => {
                member.until = now.after(member.lease);
                true
            }
            None => false,
        }
    }

    /// As [`Registry::remove`].
    pub fn remove(&mut self, number: Term) {
        self.members.remove(&number.get());
    }
}

/// A [`Board`] that several masters of one process share.
#[derive(Clone, Debug, Default)]
pub struct MemoryRegistry {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    board: Mutex<Board>,
    away: Mutex<bool>,
    news: Notify,
}

impl MemoryRegistry {
    /// As if it could not be reached, from now on or no more.
    pub fn set_away(&self, away: bool) {
        *self.shared.away.lock() = away;
        self.shared.news.notify_waiters();
    }

    fn with<'a, T: Send + 'a>(
        &'a self,
        call: impl FnOnce(&mut Board, MonoTime) -> T + Send + 'a,
    ) -> BoxFuture<'a, Result<T, RegistryError>> {
        async move {
            if *self.shared.away.lock() {
                let (address, why) = ("memory".into(), "it is away".into());
                return Err(RegistryError::Unreachable { address, why });
            }
            let done = call(&mut self.shared.board.lock(), SystemClock.now());
            self.shared.news.notify_waiters();
            Ok(done)
        }
        .boxed()
    }
}

impl Registry for MemoryRegistry {
    fn identity<'a>(&'a self, draft: &'a Identity) -> BoxFuture<'a, Result<Identity, RegistryError>> {
        self.with(move |board, _| board.identity(draft))
    }

    fn read(&self) -> BoxFuture<'_, Result<Snapshot, RegistryError>> {
        self.with(|board, now| board.read(now))
    }

    fn write<'a>(
        &'a self,
        token: Option<&'a Token>,
        document: &'a Document,
    ) -> BoxFuture<'a, Result<bool, RegistryError>> {
        self.with(move |board, _| board.write(token, document))
    }

    fn join<'a>(
        &'a self,
        number: Term,
        addresses: &'a MasterAddresses,
        lease: Duration,
    ) -> BoxFuture<'a, Result<(), RegistryError>> {
        self.with(move |board, now| board.join(now, number, addresses, lease))
    }

    fn renew(&self, number: Term) -> BoxFuture<'_, Result<bool, RegistryError>> {
        self.with(move |board, now| board.renew(now, number))
    }

    fn remove(&self, number: Term) -> BoxFuture<'_, Result<(), RegistryError>> {
        self.with(move |board, _| board.remove(number))
    }

    fn changed<'a>(&'a self, seen: &'a Snapshot, wait: Duration) -> BoxFuture<'a, ()> {
        async move {
            let until = tokio::time::Instant::now() + wait;
            loop {
                let news = self.shared.news.notified();
                if *seen != self.shared.board.lock().read(SystemClock.now()) {
                    return;
                }
                // Leases end without anybody saying so.
                let soon = until.min(tokio::time::Instant::now() + Duration::from_millis(20));
                let _ = tokio::time::timeout_at(soon, news).await;
                if tokio::time::Instant::now() >= until {
                    return;
                }
            }
        }
        .boxed()
    }
}
