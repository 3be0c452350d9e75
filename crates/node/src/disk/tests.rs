//! The disk tier on a [`SimulatedDisk`], with memory around it, the thread that carries out orders, and a session that
//! listens. What each record holds follows from its name, so that whatever comes back can be looked at.

mod faults;
mod life;
mod order;
mod planted;
mod races;

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moontide_disk::samples::{fill, id};
use moontide_disk::{BackendKind, EvictionOrder, RecordName, SimulatedDisk};
use moontide_heap::{Grant, HugePages, NewRecord, NodePin, Writer};
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{OffloadRecord, Order, OrderKind, OrderPhase, OrderResult, Packed, VersionedId};
use moontide_types::record::{Attributes, DigestContext, Flags, KeySection, RecordLayout, State};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, GroupId, Key, NodeId, ObjectId, SegmentId, SessionId, SlotId,
    Tenant, TenantGeneration, Term,
};
use parking_lot::{Condvar, Mutex};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::counters::get;
use super::planted::{Bug, Point};
use super::{DiskConfig, DiskError, DiskTier};
use crate::decide::groups::GroupSet;
use crate::decide::plan::SegmentPlan;
use crate::lines::Lines;
use crate::memory::Memory;
use crate::orders::{Obedience, Work};
use crate::session::Event;

const SEGMENT: SegmentId = SegmentId(0);
const GENERATION: Generation = Generation(9);
const SESSION: SessionId = SessionId(5);

/// The end of this one is when everything was heard that was said before.
const NOBODY: SessionId = SessionId(u64::MAX);

/// Whatever takes longer hangs. Long, because machines are busy.
const HANGS: Duration = Duration::from_secs(30);

fn term() -> Term {
    Term::new(3).unwrap()
}

/// How a [`World`] is made.
#[derive(Clone, Copy, Debug)]
struct Setup {
    backend: BackendKind,
    slots: u32,
    /// Room of each slot, in units of 512 bytes.
    units: u32,
    staging_bytes: u64,
    limit_bytes: u64,
    order: EvictionOrder,
    write_pause: Duration,
    bug: Option<Bug>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            backend: BackendKind::Bucket,
            slots: 16,
            units: 2048,
            staging_bytes: 1 << 20,
            limit_bytes: 64 << 20,
            order: EvictionOrder::Fifo,
            write_pause: Duration::from_millis(20),
            bug: None,
        }
    }
}

/// What the session heard, and what it was about.
#[derive(Clone, Debug, PartialEq)]
enum Note {
    /// An order to write a record is about to be given.
    Ordered(u64, RecordName),
    Answered(SessionId, OrderResult),
    There {
        session: SessionId,
        names: Vec<RecordName>,
        recovered: bool,
    },
    /// All that was found has been told.
    End(SessionId),
    Gone {
        session: SessionId,
        versions: Vec<(ObjectId, Epoch)>,
    },
}

/// The session: writes down what it hears.
#[derive(Debug, Default)]
struct Session {
    notes: Mutex<Vec<Note>>,
    news: Condvar,
}

impl Session {
    fn listen(&self, mut events: UnboundedReceiver<Event>) {
        while let Some(event) = events.blocking_recv() {
            match event {
                Event::Results { session, results } => {
                    let results = results.into_iter().map(|result| Note::Answered(session, result));
                    self.notes.lock().extend(results);
                }
                Event::Offloaded { session, notice } => {
                    let records =
                        Packed::<OffloadRecord>::decode(&notice.records, SESSION_RECORDS_MAX).unwrap();
                    let named =
                        |r: OffloadRecord| RecordName { id: r.id, version: r.epoch, stripe: r.stripe_index };
                    let names: Vec<RecordName> = records.iter().map(named).collect();
                    let there = Note::There { session, names, recovered: notice.recovered };
                    self.notes.lock().push(if notice.recovery_end { Note::End(session) } else { there });
                }
                Event::DiskEvicted { session, evicted } => {
                    let versions =
                        Packed::<VersionedId>::decode(&evicted.versions, SESSION_RECORDS_MAX).unwrap();
                    let versions = versions.iter().map(|version| (version.id, version.epoch)).collect();
                    self.notes.lock().push(Note::Gone { session, versions });
                }
                // See `World::heard_all`.
                Event::Report(SegmentId(u32::MAX)) => self.notes.lock().push(Note::End(NOBODY)),
                Event::Change(_) | Event::Report(_) => {}
            }
            self.news.notify_all();
        }
    }

    /// The first thing that `wanted` finds in what was heard; waits for it.
    fn hear<T>(&self, what: &str, mut wanted: impl FnMut(&Note) -> Option<T>) -> T {
        let until = Instant::now() + HANGS;
        let (mut notes, mut seen) = (self.notes.lock(), 0);
        loop {
            if let Some(found) = notes[seen..].iter().find_map(&mut wanted) {
                return found;
            }
            seen = notes.len();
            assert!(!self.news.wait_until(&mut notes, until).timed_out(), "nobody has heard: {what}");
        }
    }

    fn is_told(&self, name: RecordName) -> bool {
        let told = |note: &Note| matches!(note, Note::There { names, .. } if names.contains(&name));
        self.notes.lock().iter().any(told)
    }
}

/// A tier and everything around it.
struct World {
    setup: Setup,
    disk: SimulatedDisk,
    memory: Arc<Memory>,
    tier: Arc<DiskTier>,
    session: Arc<Session>,
    /// The one that there is now.
    current: Mutex<Option<SessionId>>,
    work: Sender<Work>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    numbers: Arc<Numbers>,
}

/// What goes on counting when the node starts anew, and what is known of all records.
#[derive(Debug, Default)]
struct Numbers {
    orders: AtomicU64,
    epochs: AtomicU64,
    /// Length and number of the object.
    records: Mutex<BTreeMap<RecordName, (u64, u64)>>,
}

impl World {
    fn new(setup: Setup) -> Arc<World> {
        World::on(SimulatedDisk::new(1), setup, Arc::default()).unwrap()
    }

    fn on(disk: SimulatedDisk, setup: Setup, numbers: Arc<Numbers>) -> Result<Arc<World>, DiskError> {
        let plan = SegmentPlan { count: 1, units: setup.slots * setup.units, slots: setup.slots };
        let memory = Memory::create(
            NodeId(1),
            GENERATION,
            plan,
            HugePages::IfAllowed,
            Some(setup.staging_bytes),
            None,
        )
        .unwrap();
        let memory = Arc::new(memory);
        memory.side(SEGMENT).unwrap().granted(GroupId(0), term());
        let config = DiskConfig {
            backend: setup.backend,
            limit_bytes: Some(setup.limit_bytes),
            order: setup.order,
            load_threads: 2,
            ..DiskConfig::new("simulated")
        };
        let (events, heard) = unbounded_channel();
        let events = Lines::one(events);
        let staging = Arc::clone(memory.staging().unwrap());
        let storage = Arc::new(disk.clone());
        let mut tier = DiskTier::on(storage, config, Arc::clone(&memory), staging, Arc::clone(&events))?;
        tier.write_pause = setup.write_pause;
        tier.trial.plant(setup.bug);
        let tier = Arc::new(tier);
        let mut threads = tier.start()?;
        let session = Arc::new(Session::default());
        let listener = Arc::clone(&session);
        std::thread::spawn(move || listener.listen(heard));
        let (work, orders) = mpsc::channel();
        let obedience = Obedience::new(Arc::clone(&memory), Some(Arc::clone(&tier)), Arc::default(), events);
        threads.push(std::thread::spawn(move || obedience.run(&orders)));
        let threads = Mutex::new(threads);
        let world =
            World { setup, disk, memory, tier, session, current: Mutex::default(), work, threads, numbers };
        world.begin_session(SESSION);
        Ok(Arc::new(world))
    }

    fn begin_session(&self, session: SessionId) {
        let ends = self.current.lock().replace(session);
        self.work.send(Work::Session { begins: Some(session), ends }).unwrap();
        ends.into_iter().for_each(|ends| self.tier.end_session(ends));
        self.tier.announce_telling(session);
        self.tier.begin_telling(session, GroupSet::all(NonZeroU16::MIN));
    }

    /// Ends all threads; none of them has died.
    fn end(&self) {
        self.tier.trial.unhook();
        self.work.send(Work::Stop).unwrap();
        self.tier.stop();
        for thread in self.threads.lock().drain(..) {
            let name = format!("{:?}", thread.thread().name());
            assert!(thread.join().is_ok(), "{name} has died");
        }
    }

    /// The power goes, and everything starts anew.
    fn crash(&self) -> Arc<World> {
        self.disk.crash_after(0);
        self.end();
        self.disk.restart();
        World::on(self.disk.clone(), self.setup, Arc::clone(&self.numbers)).unwrap()
    }

    /// Names of the records that a new session is told of.
    fn told_anew(&self, session: SessionId) -> Vec<RecordName> {
        self.begin_session(session);
        self.session.hear("the end", |note| (*note == Note::End(session)).then_some(()));
        let notes = self.session.notes.lock();
        let of_it = notes.iter().filter_map(|note| match note {
            Note::There { session: of, names, .. } if *of == session => Some(names.clone()),
            _ => None,
        });
        of_it.flatten().collect()
    }

    /// Puts a new version of an object into a slot.
    fn put(&self, slot: SlotId, number: u64, len: u64) -> RecordName {
        let epoch = Epoch::new(term(), self.numbers.epochs.fetch_add(1, Ordering::SeqCst) + 1).unwrap();
        let name = RecordName { id: id(number), version: epoch, stripe: 0 };
        let text = format!("key-{number}");
        let key = KeySection { tenant: Tenant::DEFAULT, key: Key::new(text.as_bytes()).unwrap() };
        let units = layout(&key, len).units();
        let record = NewRecord {
            id: name.id,
            flags: Flags::NONE,
            object_len: len,
            stripe_index: 0,
            stripe_count: 1,
            stripe_offset: 0,
            stripe_len: len,
            key,
            attributes: &Attributes::default(),
            id_key: 1,
            tenant_generation: TenantGeneration(0),
        };
        let extent = Extent { start: slot.0 * self.setup.units, units };
        let grant = Grant { slot, epoch, term: term(), extent, record, writer: Writer::Node };
        let heap = self.memory.heap();
        heap.begin(SEGMENT, &grant).unwrap();
        self.memory.note_begun(SEGMENT, slot, epoch, units);
        let mut claim = heap.claim(SEGMENT, slot, epoch).unwrap();
        let root = claim.fill(&payload(number, epoch, len));
        claim.publish(root).unwrap();
        self.memory.note(SEGMENT, slot, epoch, State::Ready);
        self.numbers.records.lock().insert(name, (len, number));
        name
    }

    fn order(&self, kind: OrderKind, name: RecordName, slot: SlotId) -> u64 {
        let order = self.numbers.orders.fetch_add(1, Ordering::SeqCst) + 1;
        self.give(Order { slot, ..self.blank(order, kind, name) });
        order
    }

    fn blank(&self, order: u64, kind: OrderKind, name: RecordName) -> Order {
        Order { generation: GENERATION, epoch: name.version, id: name.id, ..Order::new(order, kind, term()) }
    }

    fn give(&self, order: Order) {
        let session = self.current.lock().expect("one has begun");
        self.work.send(Work::Orders { session, orders: vec![order] }).unwrap();
    }

    fn offload(&self, name: RecordName, slot: SlotId) -> u64 {
        let order = self.numbers.orders.fetch_add(1, Ordering::SeqCst) + 1;
        self.session.notes.lock().push(Note::Ordered(order, name));
        self.give(Order { slot, ..self.blank(order, OrderKind::Offload, name) });
        order
    }

    fn remove(&self, name: RecordName) -> u64 {
        self.order(OrderKind::DropDisk, name, SlotId(0))
    }

    fn promote(&self, name: RecordName, slot: SlotId) -> u64 {
        let (len, number) = self.numbers.records.lock()[&name];
        let text = format!("key-{number}");
        let key = KeySection { tenant: Tenant::DEFAULT, key: Key::new(text.as_bytes()).unwrap() };
        let extent = Extent { start: slot.0 * self.setup.units, units: layout(&key, len).units() };
        let order = self.numbers.orders.fetch_add(1, Ordering::SeqCst) + 1;
        self.give(Order { slot, extent, ..self.blank(order, OrderKind::Promote, name) });
        order
    }

    /// The last answer to an order; for a kill, the first.
    fn answer(&self, order: u64) -> OrderResult {
        self.session.hear(&format!("an answer to {order}"), |note| match note {
            Note::Answered(_, result) if result.order == order => Some(*result),
            _ => None,
        })
    }

    /// Waits until the session has heard everything that was said so far.
    fn heard_all(&self) {
        let ends = |notes: &[Note]| notes.iter().filter(|note| **note == Note::End(NOBODY)).count();
        let before = ends(&self.session.notes.lock());
        assert!(self.tier.events.send(Event::Report(SegmentId(u32::MAX))));
        let mut count = 0;
        self.session.hear("the end", |note| {
            count += usize::from(*note == Note::End(NOBODY));
            (count > before).then_some(())
        });
    }

    /// Whether an order was carried out, or why not.
    fn outcome(&self, order: u64) -> Result<(), ErrorCode> {
        let is_last = |result: &OrderResult| result.phase != OrderPhase::Accepted;
        let result = self.session.hear(&format!("the last answer to {order}"), |note| match note {
            Note::Answered(_, result) if result.order == order && is_last(result) => Some(*result),
            _ => None,
        });
        result.code.map_or(Ok(()), Err)
    }

    /// Puts a record and has it written.
    fn store(&self, slot: SlotId, number: u64, len: u64) -> RecordName {
        let name = self.put(slot, number, len);
        assert_eq!(self.outcome(self.offload(name, slot)), Ok(()), "{name:?}");
        assert!(self.session.is_told(name), "told before it is answered");
        name
    }

    fn stage(&self, name: RecordName) -> Result<NodePin<'_>, ErrorCode> {
        self.tier.stage(&[name], Instant::now() + HANGS).pop().unwrap()
    }

    /// Stages a record and looks at every byte of it.
    fn fetch(&self, name: RecordName) -> Result<(), ErrorCode> {
        let pin = self.stage(name)?;
        self.check(name, &pin);
        Ok(())
    }

    /// Whether the bytes are those that were put.
    fn check(&self, name: RecordName, pin: &NodePin<'_>) {
        let (len, number) = *self.numbers.records.lock().get(&name).expect("nobody put it");
        assert_eq!(RecordName::of(pin.header()), name);
        assert!(pin.payload() == payload(number, name.version, len), "{name:?}: wrong bytes");
        let context = DigestContext { id: name.id, version: name.version, stripe: 0, len };
        let mut digests = vec![];
        let root = context.payload(pin.payload(), |digest| digests.extend(digest.to_le_bytes()));
        assert_eq!((pin.header().root, pin.digests()), (root, &digests[..]), "{name:?}");
    }

    fn count(&self, of: impl Fn(&super::DiskCounters) -> &AtomicU64) -> u64 {
        get(of(&self.tier.counters))
    }

    /// Every load that was asked for became one thing, and one only.
    fn check_sum(&self) {
        let until = Instant::now() + HANGS;
        loop {
            let counters = &self.tier.counters;
            let parts = [
                &counters.loads_staged,
                &counters.loads_read,
                &counters.loads_missed,
                &counters.loads_failed,
            ];
            let (requested, sum) = (get(&counters.loads_requested), parts.map(get).iter().sum::<u64>());
            if requested == sum {
                return;
            }
            // One whose caller went away may still be on its way.
            assert!(sum < requested && Instant::now() < until, "{requested} requested, and {parts:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until nothing is to be written any more, and nothing is held back.
    fn wait_for_pause(&self) {
        std::thread::sleep(self.setup.write_pause + Duration::from_millis(2));
    }
}

fn layout(key: &KeySection<'_>, len: u64) -> RecordLayout {
    RecordLayout::new(len, key.encoded_len() as u32, 0, Flags::NONE).unwrap()
}

fn payload(number: u64, version: Epoch, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    fill(number << 40 ^ version.sequence(), &mut bytes);
    bytes
}
