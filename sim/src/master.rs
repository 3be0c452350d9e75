//! [`Master`]: the shipped [`Service`] behind the simulated network, and with a registry also the shipped
//! [`ElectionState`](moontide_master::election::ElectionState).
//!
//! This file takes the place of the servers: it passes messages to the service, sends its responses, and ends removals
//! at the deadline of their caller.

mod election;
mod election_io;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use moontide_master::election::{ClusterState, MasterAddresses};
use moontide_master::{Role, Service, ServiceConfig, SessionStream};
use moontide_proto::convert::{OutcomesResponse, PutStartResponse, Wire};
use moontide_proto::limits::TIMEOUT_MS_MAX;
use moontide_proto::{CapabilitySecret, CodesBuilder, v1};
use moontide_types::{Clock, ErrorCode, MonoTime, Term};

use self::election_io::{ElectionIo, Reply};
use crate::clock::SimClock;
use crate::context::ProcessContext;
use crate::event::{MasterReply, Message, NodeRequest, NodeResponse, ProcessId, Request, Timer};
use crate::plan::RunPlan;
use crate::rng::SimRng;

/// How long a master lives at the registry without a renewal.
pub(crate) const LEASE: Duration = Duration::from_secs(5);
/// How long a call to the registry, or to another master, may take.
const REPLY_TIMEOUT: Duration = Duration::from_millis(1500);
/// Ticks between two audits, which look at everything.
const AUDIT_EVERY: u64 = 40;

/// Timers of a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MasterTimer {
    /// Its groups have something to do.
    Tick,
    /// Its election has waited long enough.
    Election,
}

/// Number of the cluster.
pub(crate) const CLUSTER: u64 = 1;

/// Where nodes reach a master.
pub(crate) fn address_of(index: usize) -> String {
    format!("master-{index}:1")
}

/// The secret that a process of a master draws.
fn secret_of(index: usize, incarnation: u32, seed: u64) -> CapabilitySecret {
    let mut secret = [0; 32];
    let words = [seed, index as u64, incarnation.into()];
    secret
        .chunks_exact_mut(8)
        .zip(words)
        .for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
    CapabilitySecret::new(secret)
}

/// Where a master is reached.
fn addresses_of(index: usize) -> MasterAddresses {
    MasterAddresses { grpc: address_of(index), frame: format!("master-{index}:2") }
}

/// The master at an address.
pub(crate) fn index_of(address: &str) -> usize {
    let number = address.strip_prefix("master-").and_then(|rest| rest.split(':').next());
    number.and_then(|number| number.parse().ok()).expect("an address of a master")
}

/// A removal whose caller waits.
struct PendingRemoval {
    client: ProcessId,
    call: u64,
    until: MonoTime,
    reply: Pin<Box<dyn Future<Output = v1::OutcomesResponse>>>,
}

/// Numbers of exclusions in the file of a single master; survive the process.
pub(crate) type Exclusions = Rc<RefCell<Vec<u32>>>;

/// A master's process.
pub(crate) struct Master {
    index: usize,
    incarnation: u32,
    election_io: Rc<ElectionIo>,
    /// `None` without a registry. Ends when the master has retired.
    election: Option<Pin<Box<dyn Future<Output = ()>>>>,
    shared: bool,
    ticking: bool,
    clock: Arc<SimClock>,
    streams: BTreeMap<u64, (ProcessId, SessionStream)>,
    removals: Vec<PendingRemoval>,
    ticks: u64,
    handed_over: u64,
    exclusions: Exclusions,
}

impl Master {
    /// Starts a process. Without a registry its incarnation is its term.
    pub(crate) fn start(
        index: usize,
        plan: &RunPlan,
        seed: u64,
        exclusions: &Exclusions,
        cx: &mut ProcessContext<'_>,
    ) -> Master {
        let clock = Arc::new(SimClock::default());
        clock.set(&cx.clock, cx.world_now());
        let groups = NonZeroU16::new(plan.groups).expect("a cluster has a group");
        let config = ServiceConfig {
            cluster: CLUSTER,
            groups,
            session_ttl: plan.session_ttl,
            repair_delay: plan.repair_delay,
            rebalance_bytes_per_s: plan.rebalance_bytes_per_s,
            hot_copy_bytes: plan.hot_copy_bytes,
            hot_copy_idle: plan.hot_copy_idle,
            capability_secret: secret_of(index, cx.incarnation, seed),
            capability_rotation: plan.capability_rotation,
            seed,
            multi_master: plan.multi_master,
            exclusions: exclusions.borrow().clone(),
            grpc_address: addresses_of(index).grpc,
            frame_address: addresses_of(index).frame,
            offload: plan.disk.as_ref().map_or_else(Default::default, |disk| disk.offload),
            admission: plan.disk.as_ref().map_or_else(Default::default, |disk| disk.admission),
            // Several objects of a small segment lie between them.
            eviction_high_watermark_permille: 950,
            eviction_low_watermark_permille: 900,
            ..ServiceConfig::for_tests()
        };
        let its_clock = Arc::clone(&clock);
        let open = move |term| {
            let config = ServiceConfig { term, ..config.clone() };
            Service::new(config, Arc::clone(&its_clock) as Arc<dyn Clock>)
        };
        let io = Rc::new(ElectionIo {
            index,
            now: Cell::new(cx.now()),
            rng: RefCell::new(SimRng::new(seed ^ 0xe1ec)),
            calls: Cell::new(u64::from(cx.incarnation) << 32),
            outbox: RefCell::default(),
            wakes: RefCell::default(),
            replies: RefCell::default(),
            handoffs: RefCell::default(),
            service: OnceCell::new(),
            open: Box::new(open),
            confirmed_until: Cell::new(MonoTime(0)),
            retires: Cell::new(false),
            handed_over: Cell::new(0),
        });
        let election = if plan.multi_master {
            let task: Pin<Box<dyn Future<Output = ()>>> =
                Box::pin(election::run(Rc::clone(&io), ClusterState::new(groups)));
            Some(task)
        } else {
            let service = (io.open)(Term::new(cx.incarnation).expect("few lives"));
            assert!(io.service.set(service).is_ok(), "it was empty");
            None
        };
        cx.wake_in(Duration::ZERO, Timer::Master(MasterTimer::Election));
        Master {
            index,
            incarnation: cx.incarnation,
            election_io: io,
            election,
            shared: plan.multi_master,
            ticking: false,
            clock,
            streams: BTreeMap::new(),
            removals: Vec::new(),
            ticks: 0,
            handed_over: 0,
            exclusions: Rc::clone(exclusions),
        }
    }

    /// None: it has not joined yet.
    pub(crate) fn service(&self) -> Option<&Arc<Service>> {
        self.election_io.service.get()
    }

    /// It is to give everything away, and to end.
    pub(crate) fn retire(&mut self, cx: &mut ProcessContext<'_>) {
        self.election_io.retires.set(true);
        cx.wake_in(Duration::ZERO, Timer::Master(MasterTimer::Election));
    }

    /// Whether it has.
    pub(crate) fn has_left(&self) -> bool {
        self.shared && self.election.is_none()
    }

    /// Groups that it handed over since it was asked the last time.
    pub(crate) fn take_handed_over(&mut self) -> u64 {
        let all = self.election_io.handed_over.get();
        all - std::mem::replace(&mut self.handed_over, all)
    }

    fn sets_clocks(&self, cx: &ProcessContext<'_>) {
        self.clock.set(&cx.clock, cx.world_now());
        self.election_io.now.set(cx.now());
    }

    pub(crate) fn wake(&mut self, timer: MasterTimer, cx: &mut ProcessContext<'_>) -> Result<(), String> {
        match timer {
            MasterTimer::Tick => self.tick(cx),
            MasterTimer::Election => {
                self.sets_clocks(cx);
                self.settle(cx)
            }
        }
    }

    /// What waits for time.
    fn tick(&mut self, cx: &mut ProcessContext<'_>) -> Result<(), String> {
        self.sets_clocks(cx);
        if let Some(service) = self.election_io.service.get() {
            let again = service.tick();
            if !self.shared {
                let stored = service.store_exclusions(|numbers| {
                    self.exclusions.replace(numbers.to_vec());
                    Ok::<(), String>(())
                });
                stored?;
            }
            self.ticks += 1;
            if self.ticks.is_multiple_of(AUDIT_EVERY) {
                service.audit()?;
                election::expire_handoffs(&self.election_io);
            }
            cx.wake_in(again, Timer::Master(MasterTimer::Tick));
        }
        self.settle(cx)
    }

    /// A message arrives.
    pub(crate) fn arrives(
        &mut self,
        from: ProcessId,
        message: Message,
        cx: &mut ProcessContext<'_>,
    ) -> Result<(), String> {
        self.sets_clocks(cx);
        match (message, self.election_io.service.get().cloned()) {
            (Message::RegistryResponse { call, reply }, _) => self.replied(call, Reply::Registry(reply)),
            (Message::HandoffAck { call }, _) => self.replied(call, Reply::HandoffAck),
            (Message::StreamEnd { stream, .. }, _) => {
                self.streams.remove(&stream);
            }
            (_, None) => {} // not serving yet
            (Message::Handoff { call, group, handoff }, Some(_)) => {
                self.election_io.handoffs.borrow_mut().insert(group, (handoff, cx.now()));
                cx.send(from, Message::HandoffAck { call });
            }
            (Message::Call { call, request }, Some(service)) => {
                self.call(&service, from, call, request, cx)?;
            }
            (Message::NodeCall { call, request }, Some(service)) => {
                let reply = match request {
                    NodeRequest::Open(m) => NodeResponse::Opened(service.open_session(&m)),
                    NodeRequest::Mount(m) => NodeResponse::Mounted(service.mount_segments(&m)),
                    NodeRequest::Unmount(m) => NodeResponse::Unmounted(service.unmount_segments(&m)),
                    NodeRequest::Map(m) => NodeResponse::Map(service.get_group_map(&m)),
                    NodeRequest::Info(m) => NodeResponse::Info(service.get_cluster_info(&m)),
                };
                cx.send(from, Message::NodeResponse { call, reply });
            }
            (Message::StreamOpen { stream, session }, Some(service)) => match service.attach(session) {
                Some(attached) => {
                    self.streams.insert(stream, (from, attached));
                    cx.send(from, Message::StreamOpened { stream });
                }
                None => {
                    let code = Some(ErrorCode::StaleSession);
                    cx.send(from, Message::StreamEnd { stream, code });
                }
            },
            (Message::FromNode { stream, message }, Some(_)) => {
                if let Some((_, attached)) = self.streams.get(&stream)
                    && let Err(code) = attached.receive(&message)
                {
                    self.streams.remove(&stream);
                    cx.send(from, Message::StreamEnd { stream, code: Some(code) });
                }
            }
            _ => unreachable!("not for a master"),
        }
        self.settle(cx)
    }

    fn replied(&mut self, call: u64, reply: Reply) {
        if let Some(waiting) = self.election_io.replies.borrow_mut().get_mut(&call) {
            *waiting = Some(reply);
        }
    }

    fn call(
        &mut self,
        service: &Arc<Service>,
        client: ProcessId,
        call: u64,
        request: Request,
        cx: &mut ProcessContext<'_>,
    ) -> Result<(), String> {
        let reply = match request {
            Request::PutStart(m) => {
                let reply = service.put_start(&m);
                self.note_epochs(&reply, cx)?;
                MasterReply::Started(reply)
            }
            Request::PutEnd(m) => MasterReply::Outcomes(service.put_end(&m)),
            Request::Revoke(m) => MasterReply::Outcomes(service.put_revoke(&m)),
            Request::Lookup(m) => MasterReply::Found(service.get_replica_list(&m)),
            Request::Exist(m) => MasterReply::Present(service.exist(&m)),
            Request::Touch(m) => MasterReply::Outcomes(service.touch(&m)),
            Request::Map(m) => MasterReply::Map(service.get_group_map(&m)),
            Request::Remove(mut m) => {
                let context = m.context.get_or_insert_default();
                let until = cx.now().after(Duration::from_millis(context.timeout_ms.into()));
                context.timeout_ms = TIMEOUT_MS_MAX;
                let service = Arc::clone(service);
                let reply = Box::pin(async move { service.remove(&m).await });
                self.removals.push(PendingRemoval { client, call, until, reply });
                return Ok(());
            }
        };
        cx.send(client, Message::Reply { call, reply });
        Ok(())
    }

    /// No epoch is given twice by a group, and no term by two masters.
    fn note_epochs(&self, reply: &v1::PutStartResponse, cx: &mut ProcessContext<'_>) -> Result<(), String> {
        let reply = PutStartResponse::from_wire(reply).map_err(|error| error.to_string())?;
        let Ok(reservations) = reply.into_result() else { return Ok(()) };
        for (object, _) in reservations.list.iter().filter(|(object, _)| object.code.is_none()) {
            cx.oracle.epoch_given(object.id, object.epoch, (self.index, self.incarnation))?;
        }
        Ok(())
    }

    /// The election goes on as far as it can.
    fn elect(&mut self, cx: &mut ProcessContext<'_>) {
        if let Some(election) = &mut self.election {
            let mut waker = Context::from_waker(Waker::noop());
            if election.as_mut().poll(&mut waker).is_ready() {
                self.election = None;
            }
        }
        for (to, message) in self.election_io.outbox.take() {
            cx.send(to, message);
        }
        for span in self.election_io.wakes.take() {
            cx.wake_in(span, Timer::Master(MasterTimer::Election));
        }
    }

    /// Sends the messages that the service has ready.
    fn settle(&mut self, cx: &mut ProcessContext<'_>) -> Result<(), String> {
        self.elect(cx);
        let Some(service) = self.election_io.service.get().cloned() else { return Ok(()) };
        if !std::mem::replace(&mut self.ticking, true) {
            cx.wake_in(Duration::ZERO, Timer::Master(MasterTimer::Tick));
        }
        if let Role::SteppedDown { seen } = service.role() {
            return Err(format!("the master stepped down for term {seen}, which was never elected"));
        }
        // The waits of the service use the runtime of the world, which never drives them: this file ends them.
        let mut waker = Context::from_waker(Waker::noop());
        let now = cx.now();
        let confirmed = !self.shared || now < self.election_io.confirmed_until.get();
        let mut uncertain = None;
        self.removals.retain_mut(|waiting| {
            let reply = match waiting.reply.as_mut().poll(&mut waker) {
                Poll::Ready(reply) => reply,
                Poll::Pending if waiting.until <= now => pending(service.term()),
                Poll::Pending => return true,
            };
            if !confirmed && is_certain(&reply) {
                uncertain = Some(waiting.call);
            }
            let (call, reply) = (waiting.call, MasterReply::Outcomes(reply));
            cx.send(waiting.client, Message::Reply { call, reply });
            false
        });
        if let Some(call) = uncertain {
            return Err(format!("a master that is not confirmed is certain about removal {call:x}"));
        }
        self.streams.retain(|&stream, (node, attached)| {
            loop {
                match attached.next_now() {
                    Ok(Some(message)) => cx.send(*node, Message::FromMaster { stream, message }),
                    Ok(None) => return true,
                    Err(_) => {
                        cx.send(*node, Message::StreamEnd { stream, code: None });
                        return false;
                    }
                }
            }
        });
        Ok(())
    }
}

/// Returns whether a response confirms a removal.
fn is_certain(reply: &v1::OutcomesResponse) -> bool {
    let codes = OutcomesResponse::from_wire(reply).ok().and_then(|reply| reply.into_result().ok());
    codes.is_some_and(|outcomes| {
        outcomes.codes.iter().any(|code| matches!(code, None | Some(ErrorCode::NotFound)))
    })
}

/// Returns the response of the service at the caller's deadline.
fn pending(term: Term) -> v1::OutcomesResponse {
    let context = v1::ResponseContext { map_version: 1, term: term.get(), ..Default::default() };
    let mut codes = CodesBuilder::default();
    codes.push(Some(ErrorCode::Pending));
    v1::OutcomesResponse { context: Some(context), codes: codes.finish().into() }
}
