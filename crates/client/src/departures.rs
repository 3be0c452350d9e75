//! [`Departures`]: what has left the store, for programs that told others what is in it.
//!
//! Each master that hosts something is asked by a call that waits there until there is something to tell; one call at a
//! time and master. Where a call has got to in a group is kept here, so that nothing is lost with an answer that never came:
//! it is asked for again. A group that goes to another master begins a new count there, and its first word is a gap.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use moontide_proto::convert::{
    DepartureCursor, GetDeparturesRequest, GetDeparturesResponse, RequestContext, Wire,
};
use moontide_proto::limits::DEPARTURES_WAIT_MS_MAX;
use moontide_proto::v1;
use moontide_types::{ErrorCode, GroupId, Key, ObjectId, Term};
use tokio::task::AbortHandle;
use tracing::debug;

use crate::cluster::{Master, Masters};
use crate::error::StoreError;
use crate::store::{Inner, Store};

/// How long a master waits for something to tell. Long enough to be no load, short enough that whoever lies between does
/// not forget the connection.
const WAIT: Duration = Duration::from_secs(10);
const _: () = assert!(WAIT.as_millis() <= DEPARTURES_WAIT_MS_MAX as u128);

/// A master that does not answer by then is not there.
const SLACK: Duration = Duration::from_secs(5);

/// Nobody waits for longer, and no sum of times overflows: a year.
const WAIT_MAX: Duration = Duration::from_secs(365 * 86_400);

/// After a failure a master is left alone for so long, and the map is looked at no more often.
const PAUSE: Duration = Duration::from_millis(500);

/// Something that a watcher is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// A get would not find this object, unless it was put again since.
    Gone(ObjectId),
    /// Something may have left that nobody tells of: look for what you care about. Comes first, because nothing is known of
    /// the time before; and when a master was replaced, or the watcher did not ask for too long.
    Gap,
}

/// Follows what leaves the store, of all tenants. For one thread; several watchers do not know of each other.
pub struct Departures {
    inner: Arc<Inner>,
    masters: Arc<Masters>,
    /// Where it has got to, by group; and in which cluster.
    cursors: HashMap<u16, (Term, u64)>,
    cluster: u64,
    /// Masters that are asked, by their place in the map.
    asked: HashMap<u16, AbortHandle>,
    sender: Sender<(u64, u16, Answer)>,
    answers: Receiver<(u64, u16, Answer)>,
    /// Answers to what was asked by an older map are of no use.
    era: u64,
    /// Some group may have another master than the map says.
    stale: bool,
    looked: Option<Instant>,
}

type Answer = Result<v1::GetDeparturesResponse, String>;

impl fmt::Debug for Departures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = self.cursors.len();
        f.debug_struct("Departures").field("groups", &groups).finish_non_exhaustive()
    }
}

impl Store {
    /// Begins to follow what leaves the store.
    pub fn departures(&self) -> Departures {
        let (sender, answers) = channel();
        Departures {
            masters: self.inner.cluster.masters(),
            inner: Arc::clone(&self.inner),
            cursors: HashMap::new(),
            cluster: 0,
            asked: HashMap::new(),
            sender,
            answers,
            era: 0,
            stale: false,
            looked: None,
        }
    }

    /// The id by which [`Departures`] name an object. Another one after everything of the tenant was removed.
    pub fn object_id(&self, key: &[u8]) -> Result<ObjectId, StoreError> {
        let inner = &*self.inner;
        Ok(inner.near.id(inner.cluster.tenant(), Key::new(key)?))
    }
}

impl Departures {
    /// The next news; none if there are none in time. Never empty. A master that is away is asked again until it answers:
    /// nothing is said of it but, later, a gap.
    pub fn next(&mut self, timeout: Duration) -> Option<Vec<Departure>> {
        let until = Instant::now() + timeout.min(WAIT_MAX);
        loop {
            self.follow_map(until);
            self.ask_all();
            let left = until.saturating_duration_since(Instant::now());
            let left = if self.stale { left.min(PAUSE) } else { left };
            match self.answers.recv_timeout(left) {
                Ok((era, master, answer)) if era == self.era => {
                    self.asked.remove(&master);
                    let news = self.heard(master, answer);
                    if !news.is_empty() {
                        return Some(news);
                    }
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(_) => return None,
            }
        }
    }

    /// Takes over a newer map, and looks for one if this one seems to be wrong.
    fn follow_map(&mut self, until: Instant) {
        let cluster = &self.inner.cluster;
        let due = self.looked.is_none_or(|looked| looked.elapsed() >= PAUSE);
        if self.stale && due && !cluster.is_alone() {
            self.looked = Some(Instant::now());
            cluster.look(self.masters.version(), until);
        }
        let masters = cluster.masters();
        if !Arc::ptr_eq(&masters, &self.masters) {
            self.masters = masters;
            self.era += 1;
            self.stale = false;
            self.asked.drain().for_each(|(_, task)| task.abort());
        }
        // A group without a master gets one some time.
        self.stale |= !self.masters.is_complete();
    }

    /// Asks all masters that are not being asked.
    fn ask_all(&mut self) {
        let masters = Arc::clone(&self.masters);
        for (at, master) in masters.by_place() {
            if !self.asked.contains_key(&at) {
                self.ask(at, master, Duration::ZERO);
            }
        }
    }

    fn ask(&mut self, at: u16, master: &Master, pause: Duration) {
        let cursor = |group: u16| {
            let (term, next) = self.cursors.get(&group).copied().unwrap_or((Term::ZERO, 0));
            DepartureCursor { group: GroupId(group), term, next }
        };
        let cursors: Vec<DepartureCursor> = self.masters.groups_of(at).map(cursor).collect();
        if cursors.is_empty() {
            return;
        }
        let cluster = &self.inner.cluster;
        let deadline_ms = (WAIT + SLACK).as_millis() as u32; // a constant
        let context = RequestContext { deadline_ms, ..cluster.context(Instant::now()) };
        let wait_ms = WAIT.as_millis() as u32; // a constant
        let request = GetDeparturesRequest { context, cursors, wait_ms, cluster: self.cluster };
        let request = request.to_wire();
        let (mut client, sender, era) = (master.client(), self.sender.clone(), self.era);
        let task = cluster.start(async move {
            tokio::time::sleep(pause).await;
            let answer = match tokio::time::timeout(WAIT + SLACK, client.get_departures(request)).await {
                Ok(Ok(answer)) => Ok(answer.into_inner()),
                Ok(Err(status)) => Err(status.message().to_owned()),
                Err(_) => Err("no answer in time".to_owned()),
            };
            // Nobody may listen any more.
            let _ = sender.send((era, at, answer));
        });
        self.asked.insert(at, task);
    }

    fn heard(&mut self, at: u16, answer: Answer) -> Vec<Departure> {
        let told = answer.and_then(|message| {
            if let Some(map) = message.context.as_ref().and_then(|context| context.newer_map.as_ref()) {
                self.inner.cluster.heard_of(map);
            }
            self.understood(&message)
        });
        told.unwrap_or_else(|why| {
            debug!(why, "a master tells nothing of departures");
            self.stale = true;
            let masters = Arc::clone(&self.masters);
            if let Some((_, master)) = masters.by_place().find(|(place, _)| *place == at) {
                self.ask(at, master, PAUSE);
            }
            vec![]
        })
    }

    fn understood(&mut self, message: &v1::GetDeparturesResponse) -> Result<Vec<Departure>, String> {
        let answer = GetDeparturesResponse::from_wire(message).map_err(|error| error.to_string())?;
        let body = answer.into_result().map_err(|context| match context.code {
            Some(code) => code.to_string(),
            None => ErrorCode::Internal.to_string(),
        })?;
        if body.cluster != self.cluster {
            self.cluster = body.cluster;
            self.cursors.clear();
        }
        let (mut news, mut gap) = (vec![], false);
        let mut elsewhere = None;
        for (group, told) in body.groups {
            match told {
                Ok(told) => {
                    gap |= told.gap;
                    news.extend(told.ids().map(Departure::Gone));
                    self.cursors.insert(group.0, (told.term, told.next));
                }
                Err(code) => elsewhere = Some(code),
            }
        }
        if gap {
            news.push(Departure::Gap);
        }
        self.stale = elsewhere.is_some();
        match elsewhere {
            // At once it would say the same.
            Some(code) if news.is_empty() => Err(code.to_string()),
            _ => Ok(news),
        }
    }
}

impl Drop for Departures {
    fn drop(&mut self) {
        self.asked.drain().for_each(|(_, task)| task.abort());
    }
}
