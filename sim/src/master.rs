//! [`Master`]: the shipped [`Service`] behind the simulated network, and beside it, where there is a registry, what the
//! shipped [`Candidate`](moontide_master::election::Candidate) decides.
//!
//! What a door does stands here: it hands messages in, sends what the service says, and gives up on removals when
//! their caller does.

mod desk;
mod election;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use moontide_master::election::{Document, MasterAddresses};
use moontide_master::{Role, Service, ServiceConfig, SessionStream};
use moontide_proto::convert::{OutcomesResponse, PutStartResponse, Wire};
use moontide_proto::limits::DEADLINE_MS_MAX;
use moontide_proto::{CodesBuilder, v1};
use moontide_types::{Clock, ErrorCode, MonoTime, Term};
use tokio::runtime::Runtime;

use self::desk::{Desk, Reply};
use crate::clock::SetClock;
use crate::dice::Dice;
use crate::event::{Answer, Message, NodeAnswer, NodeRequest, Request, Timer, Who};
use crate::plan::Plan;
use crate::scene::Scene;

/// How long a master lives at the registry without a renewal.
pub(crate) const LEASE: Duration = Duration::from_secs(5);
/// How long a call to the registry, or to another master, may take.
const ANSWER_MAX: Duration = Duration::from_millis(1500);
/// Ticks between two audits, which look at everything.
const AUDIT_EVERY: u64 = 40;

/// What a master wants to be woken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MasterTimer {
    /// Its groups have something to do.
    Tick,
    /// Its election has waited long enough.
    Election,
}

/// Where a master is reached.
fn addresses_of(index: usize) -> MasterAddresses {
    MasterAddresses { grpc: format!("master-{index}:1"), frame: format!("master-{index}:2") }
}

/// The master at an address.
pub(crate) fn index_of(address: &str) -> usize {
    let number = address.strip_prefix("master-").and_then(|rest| rest.split(':').next());
    number.and_then(|number| number.parse().ok()).expect("an address of a master")
}

/// A removal whose caller waits.
struct Waiting {
    client: Who,
    call: u64,
    until: MonoTime,
    answer: Pin<Box<dyn Future<Output = v1::OutcomesResponse>>>,
}

/// A master's process.
pub(crate) struct Master {
    index: usize,
    life: u32,
    desk: Rc<Desk>,
    /// None: it is alone. It ends when the master has retired.
    election: Option<Pin<Box<dyn Future<Output = ()>>>>,
    shared: bool,
    ticking: bool,
    clock: Arc<SetClock>,
    streams: BTreeMap<u64, (Who, SessionStream)>,
    removals: Vec<Waiting>,
    ticks: u64,
    handed_over: u64,
    /// Waits of the service stand in a runtime that nobody drives: they end when this file says so.
    runtime: Runtime,
}

impl Master {
    /// A process that has just started. One that is alone has its life as its term.
    pub(crate) fn start(index: usize, plan: &Plan, seed: u64, scene: &mut Scene<'_>) -> Master {
        let clock = Arc::new(SetClock::default());
        clock.set(&scene.clock, scene.true_now());
        let groups = NonZeroU16::new(plan.groups).expect("a cluster has a group");
        let config = ServiceConfig {
            groups,
            session_ttl: plan.session_ttl,
            seed,
            shared: plan.shared,
            grpc_address: addresses_of(index).grpc,
            frame_address: addresses_of(index).frame,
            ..ServiceConfig::for_tests()
        };
        let its_clock = Arc::clone(&clock);
        let open = move |term| {
            let config = ServiceConfig { term, ..config.clone() };
            Service::new(config, Arc::clone(&its_clock) as Arc<dyn Clock>)
        };
        let desk = Rc::new(Desk {
            index,
            now: Cell::new(scene.now()),
            dice: RefCell::new(Dice::new(seed ^ 0xe1ec)),
            calls: Cell::new(u64::from(scene.life) << 32),
            letters: RefCell::default(),
            wakes: RefCell::default(),
            replies: RefCell::default(),
            estates: RefCell::default(),
            service: OnceCell::new(),
            open: Box::new(open),
            confirmed_until: Cell::new(MonoTime(0)),
            retires: Cell::new(false),
            handed_over: Cell::new(0),
        });
        let election = if plan.shared {
            let task: Pin<Box<dyn Future<Output = ()>>> =
                Box::pin(election::run(Rc::clone(&desk), Document::new(groups)));
            Some(task)
        } else {
            let service = (desk.open)(Term::new(scene.life).expect("few lives"));
            assert!(desk.service.set(service).is_ok(), "it was empty");
            None
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.expect("a runtime without threads needs nothing");
        scene.wake_in(Duration::ZERO, Timer::Master(MasterTimer::Election));
        Master {
            index,
            life: scene.life,
            desk,
            election,
            shared: plan.shared,
            ticking: false,
            clock,
            streams: BTreeMap::new(),
            removals: Vec::new(),
            ticks: 0,
            handed_over: 0,
            runtime,
        }
    }

    /// None: it has not joined yet.
    pub(crate) fn service(&self) -> Option<&Arc<Service>> {
        self.desk.service.get()
    }

    /// It is to give everything away, and to end.
    pub(crate) fn retire(&mut self, scene: &mut Scene<'_>) {
        self.desk.retires.set(true);
        scene.wake_in(Duration::ZERO, Timer::Master(MasterTimer::Election));
    }

    /// Whether it has.
    pub(crate) fn has_left(&self) -> bool {
        self.shared && self.election.is_none()
    }

    /// Groups that it handed over since it was asked the last time.
    pub(crate) fn take_handed_over(&mut self) -> u64 {
        let all = self.desk.handed_over.get();
        all - std::mem::replace(&mut self.handed_over, all)
    }

    fn sets_clocks(&self, scene: &Scene<'_>) {
        self.clock.set(&scene.clock, scene.true_now());
        self.desk.now.set(scene.now());
    }

    pub(crate) fn wake(&mut self, timer: MasterTimer, scene: &mut Scene<'_>) -> Result<(), String> {
        match timer {
            MasterTimer::Tick => self.tick(scene),
            MasterTimer::Election => {
                self.sets_clocks(scene);
                self.settle(scene)
            }
        }
    }

    /// What waits for time.
    fn tick(&mut self, scene: &mut Scene<'_>) -> Result<(), String> {
        self.sets_clocks(scene);
        if let Some(service) = self.desk.service.get() {
            let again = service.tick();
            self.ticks += 1;
            if self.ticks.is_multiple_of(AUDIT_EVERY) {
                service.audit()?;
                election::tidy_estates(&self.desk);
            }
            scene.wake_in(again, Timer::Master(MasterTimer::Tick));
        }
        self.settle(scene)
    }

    /// A message arrives.
    pub(crate) fn arrives(
        &mut self,
        from: Who,
        message: Message,
        scene: &mut Scene<'_>,
    ) -> Result<(), String> {
        self.sets_clocks(scene);
        match (message, self.desk.service.get().cloned()) {
            (Message::RegistryAnswer { call, answer }, _) => self.replied(call, Reply::Registry(answer)),
            (Message::Bequeathed { call }, _) => self.replied(call, Reply::Bequeathed),
            (Message::StreamEnd { stream, .. }, _) => {
                self.streams.remove(&stream);
            }
            (_, None) => {} // nobody listens there yet
            (Message::Bequest { call, group, estate }, Some(_)) => {
                self.desk.estates.borrow_mut().insert(group, (estate, scene.now()));
                scene.send(from, Message::Bequeathed { call });
            }
            (Message::Call { call, request }, Some(service)) => {
                self.call(&service, from, call, request, scene)?;
            }
            (Message::NodeCall { call, request }, Some(service)) => {
                let answer = match request {
                    NodeRequest::Open(m) => NodeAnswer::Opened(service.open_session(&m)),
                    NodeRequest::Mount(m) => NodeAnswer::Mounted(service.mount_segments(&m)),
                    NodeRequest::Map(m) => NodeAnswer::Map(service.get_group_map(&m)),
                };
                scene.send(from, Message::NodeAnswer { call, answer });
            }
            (Message::StreamOpen { stream, session }, Some(service)) => match service.attach(session) {
                Some(attached) => {
                    self.streams.insert(stream, (from, attached));
                    scene.send(from, Message::StreamOpened { stream });
                }
                None => {
                    let code = Some(ErrorCode::StaleSession);
                    scene.send(from, Message::StreamEnd { stream, code });
                }
            },
            (Message::FromNode { stream, message }, Some(_)) => {
                if let Some((_, attached)) = self.streams.get(&stream)
                    && let Err(code) = attached.receive(&message)
                {
                    self.streams.remove(&stream);
                    scene.send(from, Message::StreamEnd { stream, code: Some(code) });
                }
            }
            _ => unreachable!("not for a master"),
        }
        self.settle(scene)
    }

    fn replied(&mut self, call: u64, reply: Reply) {
        if let Some(waiting) = self.desk.replies.borrow_mut().get_mut(&call) {
            *waiting = Some(reply);
        }
    }

    fn call(
        &mut self,
        service: &Arc<Service>,
        client: Who,
        call: u64,
        request: Request,
        scene: &mut Scene<'_>,
    ) -> Result<(), String> {
        let answer = match request {
            Request::PutStart(m) => {
                let answer = service.put_start(&m);
                self.note_epochs(&answer, scene)?;
                Answer::Started(answer)
            }
            Request::PutEnd(m) => Answer::Outcomes(service.put_end(&m)),
            Request::Revoke(m) => Answer::Outcomes(service.put_revoke(&m)),
            Request::Lookup(m) => Answer::Found(service.get_replica_list(&m)),
            Request::Exist(m) => Answer::Present(service.exist(&m)),
            Request::Touch(m) => Answer::Outcomes(service.touch(&m)),
            Request::Map(m) => Answer::Map(service.get_group_map(&m)),
            Request::Remove(mut m) => {
                let context = m.context.get_or_insert_default();
                let until = scene.now().after(Duration::from_millis(context.deadline_ms.into()));
                context.deadline_ms = DEADLINE_MS_MAX;
                let service = Arc::clone(service);
                let answer = Box::pin(async move { service.remove(&m).await });
                self.removals.push(Waiting { client, call, until, answer });
                return Ok(());
            }
        };
        scene.send(client, Message::Answer { call, answer });
        Ok(())
    }

    /// No epoch is given twice by a group, and no term by two masters.
    fn note_epochs(&self, answer: &v1::PutStartResponse, scene: &mut Scene<'_>) -> Result<(), String> {
        let answer = PutStartResponse::from_wire(answer).map_err(|error| error.to_string())?;
        let Ok(reservations) = answer.into_result() else { return Ok(()) };
        for (object, _) in reservations.list.iter().filter(|(object, _)| object.code.is_none()) {
            scene.oracle.epoch_given(object.id, object.epoch, (self.index, self.life))?;
        }
        Ok(())
    }

    /// The election goes on as far as it can.
    fn elect(&mut self, scene: &mut Scene<'_>) {
        if let Some(election) = &mut self.election {
            let mut waker = Context::from_waker(Waker::noop());
            if election.as_mut().poll(&mut waker).is_ready() {
                self.election = None;
            }
        }
        for (to, message) in self.desk.letters.take() {
            scene.send(to, message);
        }
        for span in self.desk.wakes.take() {
            scene.wake_in(span, Timer::Master(MasterTimer::Election));
        }
    }

    /// Sends what the service has to say by now.
    fn settle(&mut self, scene: &mut Scene<'_>) -> Result<(), String> {
        self.elect(scene);
        let Some(service) = self.desk.service.get().cloned() else { return Ok(()) };
        if !std::mem::replace(&mut self.ticking, true) {
            scene.wake_in(Duration::ZERO, Timer::Master(MasterTimer::Tick));
        }
        if let Role::SteppedDown { seen } = service.role() {
            return Err(format!("the master stepped down for term {seen}, which was never elected"));
        }
        let _entered = self.runtime.enter();
        let mut waker = Context::from_waker(Waker::noop());
        let now = scene.now();
        let confirmed = !self.shared || now < self.desk.confirmed_until.get();
        let mut uncertain = None;
        self.removals.retain_mut(|waiting| {
            let answer = match waiting.answer.as_mut().poll(&mut waker) {
                Poll::Ready(answer) => answer,
                Poll::Pending if waiting.until <= now => pending(service.term()),
                Poll::Pending => return true,
            };
            if !confirmed && is_certain(&answer) {
                uncertain = Some(waiting.call);
            }
            let (call, answer) = (waiting.call, Answer::Outcomes(answer));
            scene.send(waiting.client, Message::Answer { call, answer });
            false
        });
        if let Some(call) = uncertain {
            return Err(format!("a master that is not confirmed is certain about removal {call:x}"));
        }
        self.streams.retain(|&stream, (node, attached)| {
            loop {
                match attached.next_now() {
                    Ok(Some(message)) => scene.send(*node, Message::FromMaster { stream, message }),
                    Ok(None) => return true,
                    Err(_) => {
                        scene.send(*node, Message::StreamEnd { stream, code: None });
                        return false;
                    }
                }
            }
        });
        Ok(())
    }
}

/// Whether an answer says that something is removed.
fn is_certain(answer: &v1::OutcomesResponse) -> bool {
    let codes = OutcomesResponse::from_wire(answer).ok().and_then(|answer| answer.into_result().ok());
    codes.is_some_and(|outcomes| {
        outcomes.codes.iter().any(|code| matches!(code, None | Some(ErrorCode::NotFound)))
    })
}

/// What the service answers when a caller's deadline comes.
fn pending(term: Term) -> v1::OutcomesResponse {
    let context = v1::ResponseContext { map_version: 1, term: term.get(), ..Default::default() };
    let mut codes = CodesBuilder::default();
    codes.push(Some(ErrorCode::Pending));
    v1::OutcomesResponse { context: Some(context), codes: codes.finish().into() }
}
