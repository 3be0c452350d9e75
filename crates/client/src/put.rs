//! Puts: a reservation at the master, bytes to the nodes, and the end at the master.
//!
//! ```text
//!   PutStart ─▶ for each node: Begin ─▶ bytes, digested on the way ─▶ Commit(root) ─▶ PutEnd(roots, outcomes)
//! ```
//!
//! Replicas and stripes go to their nodes at the same time. A put counts when PutEnd was answered; a replica counts when
//! all of its stripes were committed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_proto::convert::{
    self, CallerId, OutcomesResponse, PutConfig, PutEndRequest, PutStartRequest, PutStartResponse,
    RequestContext, Wire,
};
use moontide_proto::{
    Handle, Medium, ObjectEntry, Packed, PackedBuilder, PackedBytesBuilder, PackedKeysBuilder, PutEndEntry, PutEntry,
    v1,
};
use moontide_types::bounds::BATCH_KEYS_MAX;
use moontide_types::record::object_root;
use moontide_types::{ErrorCode, Key};

use crate::cluster::{Master, draw, spread};
use crate::link::KeyResult;
use crate::config::{KEYS_PER_CALL, PutOptions};
use crate::decide::Backoff;
use crate::error::StoreError;
use crate::link::Located;
use crate::nodes::is_of_connection;
use crate::place::Placed;
use crate::store::{Inner, Store};
use crate::write::Writing;

/// What a put did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The object is stored.
    Stored,
    /// An object of this key was there; nothing was changed.
    Existed,
}

/// One object of a batch.
#[derive(Clone, Copy, Debug)]
pub struct PutItem<'a> {
    /// Its key.
    pub key: &'a [u8],
    /// Its bytes, one part behind the other.
    pub parts: &'a [&'a [u8]],
}

/// Before a put whose node could not be reached is tried again. As many times as the budget allows are longer than a link
/// rests after it failed.
const UNREACHABLE_PAUSE: Duration = Duration::from_millis(100);

impl Store {
    /// Stores an object.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<Put, StoreError> {
        self.put_with(key, &[value], &PutOptions::default())
    }

    /// Stores an object whose bytes lie in several places.
    pub fn put_with(&self, key: &[u8], parts: &[&[u8]], options: &PutOptions) -> Result<Put, StoreError> {
        let outcomes = self.put_batch(&[PutItem { key, parts }], options);
        outcomes.into_iter().next().expect("one outcome per item")
    }

    /// Stores many objects; one outcome for each, in order.
    pub fn put_batch(&self, items: &[PutItem<'_>], options: &PutOptions) -> Vec<Result<Put, StoreError>> {
        self.inner.put_batch(items, options, self.inner.deadline())
    }
}

impl Inner {
    pub(crate) fn put_batch(
        &self,
        items: &[PutItem<'_>],
        options: &PutOptions,
        deadline: Instant,
    ) -> Vec<Result<Put, StoreError>> {
        if let Err(error) = options.validate() {
            return items.iter().map(|_| Err(error.clone())).collect();
        }
        if let Err(error) = self.check_nodes(options, deadline) {
            return items.iter().map(|_| Err(error.clone())).collect();
        }
        let outcomes = self.put_all(items, options, deadline);
        for (item, outcome) in items.iter().zip(&outcomes) {
            let metrics = &self.metrics;
            metrics.puts.inc();
            match outcome {
                Ok(Put::Stored) => {
                    let len: usize = item.parts.iter().map(|part| part.len()).sum();
                    metrics.bytes_written.inc_by(len as u64);
                }
                Ok(Put::Existed) => {
                    metrics.puts_existed.inc();
                }
                Err(_) => {
                    metrics.puts_failed.inc();
                }
            }
        }
        outcomes
    }
}

/// How objects are put: by which call, and as what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How<'a> {
    pub(crate) caller: CallerId,
    pub(crate) options: &'a PutOptions,
    /// The attributes section of each.
    pub(crate) attributes: &'a [u8],
    /// In which kind of memory others than this crate fill them, and nobody digests their bytes; `None`: as usual.
    pub(crate) in_place: Option<Medium>,
}

/// A reservation: where an object may be written.
#[derive(Clone, Debug)]
pub(crate) struct Granted {
    pub(crate) object: ObjectEntry,
    pub(crate) handles: Vec<Handle>,
}

/// What PutStart said about a key.
pub(crate) enum Start {
    Granted(Granted),
    Existed,
    /// Come again after a pause.
    Later {
        code: ErrorCode,
        after: Duration,
    },
    Refused(StoreError),
}

impl Inner {
    /// Enough nodes for what is wanted: without them no waiting helps.
    fn check_nodes(&self, options: &PutOptions, deadline: Instant) -> Result<(), StoreError> {
        let wanted = usize::from(options.replicas_min);
        if self.nodes.count() < wanted {
            self.refresh_nodes(deadline)?;
        }
        let nodes = self.nodes.count();
        if nodes >= wanted { Ok(()) } else { Err(StoreError::TooFewNodes { wanted, nodes }) }
    }

    fn put_all(
        &self,
        items: &[PutItem<'_>],
        options: &PutOptions,
        deadline: Instant,
    ) -> Vec<Result<Put, StoreError>> {
        let mut attributes = Vec::new();
        options.attributes().encode(&mut attributes);
        let mut outcomes: Vec<Option<Result<Put, StoreError>>> = vec![None; items.len()];
        let mut lasts: Vec<Option<StoreError>> = vec![None; items.len()];
        let mut backoff = Backoff::default();
        items.iter().for_each(|_| self.budget.lock().earn());
        // Of this call alone: what it has begun it may begin again, and nobody else of this process.
        let how = How { caller: CallerId(draw()), options, attributes: &attributes, in_place: None };
        loop {
            let open: Vec<usize> = (0..items.len()).filter(|&at| outcomes[at].is_none()).collect();
            if open.is_empty() {
                return outcomes.into_iter().map(|outcome| outcome.expect("none is open")).collect();
            }
            let mut pause = Duration::ZERO;
            for part in open.chunks(KEYS_PER_CALL) {
                let after =
                    self.put_some(items, part, how, &mut outcomes, &mut lasts, deadline);
                pause = pause.max(after);
            }
            if outcomes.iter().any(Option::is_none) {
                let pause = backoff.pause(pause, spread());
                if Instant::now() + pause >= deadline {
                    for (outcome, last) in outcomes.iter_mut().zip(&mut lasts).filter(|(o, _)| o.is_none()) {
                        *outcome = Some(Err(last.take().unwrap_or_else(|| self.too_late())));
                    }
                    continue;
                }
                self.metrics.retries.inc();
                std::thread::sleep(pause);
            }
        }
    }

    /// One attempt for some of the items. The answer: how long to pause before the next one.
    fn put_some(
        &self,
        items: &[PutItem<'_>],
        part: &[usize],
        how: How<'_>,
        outcomes: &mut [Option<Result<Put, StoreError>>],
        lasts: &mut [Option<StoreError>],
        deadline: Instant,
    ) -> Duration {
        let mut asked: Vec<(usize, Key<'_>, u64)> = Vec::with_capacity(part.len());
        for &at in part {
            let len = items[at].parts.iter().map(|part| part.len() as u64).sum();
            match Key::new(items[at].key) {
                Ok(key) => asked.push((at, key, len)),
                Err(error) => outcomes[at] = Some(Err(error.into())),
            }
        }
        let keys: Vec<(Key<'_>, u64)> = asked.iter().map(|&(_, key, len)| (key, len)).collect();
        let started = match self.put_start(&keys, how, deadline) {
            Ok(started) => started,
            Err(error) => {
                let again = error.is_retryable();
                for &(at, ..) in &asked {
                    match again {
                        true => lasts[at] = Some(error.clone()),
                        false => outcomes[at] = Some(Err(error.clone())),
                    }
                }
                return Duration::ZERO;
            }
        };
        let mut pause = Duration::ZERO;
        let (mut writing, mut of) = (Vec::new(), Vec::new());
        for (&(at, key, _), start) in asked.iter().zip(started) {
            match start {
                Start::Existed => outcomes[at] = Some(Ok(Put::Existed)),
                Start::Refused(error) => outcomes[at] = Some(Err(error)),
                Start::Later { code, after } => {
                    lasts[at] = Some(StoreError::refused(code));
                    pause = pause.max(after);
                }
                Start::Granted(granted) => {
                    writing.push(Writing::new(key, granted, items[at].parts, how.attributes));
                    of.push(at);
                }
            }
        }
        self.write(&mut writing, deadline);
        let least = how.options.replicas_min;
        writing.iter_mut().for_each(|writing| writing.insist_on(least));
        let ended = self.put_end(&mut writing, deadline);
        for ((at, ended), writing) in of.into_iter().zip(ended).zip(&mut writing) {
            match ended {
                Ok(()) => {
                    self.remember_written(writing);
                    outcomes[at] = Some(Ok(Put::Stored));
                }
                Err(error) => {
                    let error = writing.last.take().unwrap_or(error);
                    // A node that went away in the middle: the master has others.
                    let again = error.is_retryable() || error.code() == ErrorCode::Gone || is_lost(&error);
                    // A node that cannot be reached is not tried again for a moment; others may be, and so may it, later.
                    if error.code() == ErrorCode::Unreachable {
                        pause = pause.max(UNREACHABLE_PAUSE);
                    }
                    match again && self.budget.lock().spend() {
                        true => lasts[at] = Some(error),
                        false => outcomes[at] = Some(Err(error)),
                    }
                }
            }
        }
        pause
    }

    /// Reserves space; one answer per key.
    pub(crate) fn put_start(
        &self,
        keys: &[(Key<'_>, u64)],
        how: How<'_>,
        deadline: Instant,
    ) -> Result<Vec<Start>, StoreError> {
        let tenant = self.cluster.tenant();
        let started = self.cluster.route(
            keys.len(),
            deadline,
            |at| self.near.id(tenant, keys[at].0),
            |master, part| {
                let keys: Vec<(Key<'_>, u64)> = part.iter().map(|&at| keys[at]).collect();
                self.put_start_at(master, &keys, how, deadline)
            },
        );
        let refused = |code| Start::Refused(StoreError::refused(code));
        let start = |started: Result<KeyResult<Start>, StoreError>| match started {
            Ok(start) => Ok(start.unwrap_or_else(refused)),
            // With one master a failed call is that of all keys; with several, what others have granted stands.
            Err(error) if self.cluster.is_alone() => Err(error),
            Err(error) => Ok(Start::Refused(error)),
        };
        started.into_iter().map(start).collect()
    }

    /// The same at one master; what it does not host is an error of the key.
    fn put_start_at(
        &self,
        master: &Master,
        keys: &[(Key<'_>, u64)],
        how: How<'_>,
        deadline: Instant,
    ) -> Result<Vec<KeyResult<Start>>, StoreError> {
        let How { caller, options, attributes, in_place } = how;
        let packing = |source| StoreError::Answer(convert::ConvertError::Packed { field: "keys", source });
        let mut packed = PackedKeysBuilder::new();
        for (key, _) in keys {
            packed.push(*key).map_err(packing)?;
        }
        let packed = packed.finish();
        let objects: PackedBuilder<PutEntry> =
            keys.iter().map(|&(_, len)| PutEntry { len, config: 0 }).collect();
        let objects = objects.finish();
        let sections = sections(attributes, keys.len());
        let config = PutConfig {
            replicas: options.replicas,
            replicas_min: options.replicas_min,
            stripes: options.stripes,
            // Stripes are there to be spread.
            local_node: match options.prefer {
                Some(node) => Some(node),
                None if options.near && options.stripes.is_none() => self.nodes.mapped(),
                None => None,
            },
            preferred_nodes: self.nodes.good_if_some_are_not(),
            digestless: in_place.is_some(),
            medium: in_place,
            upsert: options.upsert,
            ttl_ms: options.ttl.map_or(0, |ttl| (ttl.as_millis() as u64).max(1)),
            ..PutConfig::default()
        };
        let message = v1::PutStartRequest {
            context: Some(RequestContext { caller, ..self.cluster.context(deadline) }.to_wire()),
            keys: packed.into(),
            configs: vec![config.to_wire()],
            objects: objects.into(),
            attributes: sections.into(),
        };
        let request = PutStartRequest::from_wire(&message).map_err(StoreError::Answer)?;
        let reply = master.link(&self.cluster)?.call(&request)?;
        let answer = PutStartResponse::from_wire(&reply).map_err(StoreError::Answer)?;
        let retry_after = Duration::from_millis(answer.context().retry_after_ms.into());
        let reservations = match answer.into_result() {
            Ok(reservations) => reservations,
            Err(context) => {
                let code = context.code.unwrap_or(ErrorCode::Internal);
                return Err(StoreError::refused(code));
            }
        };
        let start = |(object, handles): (ObjectEntry, Packed<'_, Handle>)| match object.code {
            None => {
                self.learn_generation(object.tenant_generation);
                Ok(Start::Granted(Granted { object, handles: handles.iter().collect() }))
            }
            Some(ErrorCode::AlreadyExists) => Ok(Start::Existed),
            Some(code @ (ErrorCode::NoSpace | ErrorCode::Busy | ErrorCode::Retry)) => {
                Ok(Start::Later { code, after: retry_after.max(PAUSE_FOR_ROOM) })
            }
            Some(code) => Err(code),
        };
        Ok(reservations.list.iter().map(start).collect())
    }

    /// Ends puts; one answer each.
    pub(crate) fn put_end(
        &self,
        writing: &mut [Writing<'_>],
        deadline: Instant,
    ) -> Vec<Result<(), StoreError>> {
        let mut answers: Vec<Option<Result<(), StoreError>>> = vec![None; writing.len()];
        let mut backoff = Backoff::default();
        loop {
            let open: Vec<usize> = (0..writing.len()).filter(|&at| answers[at].is_none()).collect();
            if open.is_empty() {
                return answers.into_iter().map(|answer| answer.expect("none is open")).collect();
            }
            match self.put_end_once(writing, &open, deadline) {
                Ok(codes) => {
                    for (&at, code) in open.iter().zip(codes) {
                        answers[at] = match code {
                            None => Some(Ok(())),
                            Some(ErrorCode::Retry) => None,
                            Some(code) => Some(Err(StoreError::refused(code))),
                        };
                    }
                }
                // Idempotent: it may be said again whether it was heard or not.
                Err(error) if error.is_retryable() && Instant::now() < deadline => {}
                Err(error) => open.iter().for_each(|&at| answers[at] = Some(Err(error.clone()))),
            }
            if answers.iter().any(Option::is_none) {
                let pause = backoff.pause(Duration::ZERO, spread());
                if Instant::now() + pause >= deadline {
                    let late = || Some(Err(self.too_late()));
                    answers.iter_mut().filter(|answer| answer.is_none()).for_each(|answer| *answer = late());
                    continue;
                }
                std::thread::sleep(pause);
            }
        }
    }

    fn put_end_once(
        &self,
        writing: &[Writing<'_>],
        open: &[usize],
        deadline: Instant,
    ) -> Result<Vec<Option<ErrorCode>>, StoreError> {
        let ends: Vec<_> = open.iter().map(|&at| writing[at].end()).collect();
        let ended = self.cluster.route(
            ends.len(),
            deadline,
            |at| ends[at].0.id,
            |master, part| self.put_end_at(master, part.iter().map(|&at| &ends[at]), deadline),
        );
        ended.into_iter().map(|end| end.map(Result::err)).collect()
    }

    /// The same at one master.
    fn put_end_at<'e>(
        &self,
        master: &Master,
        ends: impl ExactSizeIterator<Item = &'e (PutEndEntry, Vec<u64>)>,
        deadline: Instant,
    ) -> Result<Vec<KeyResult<()>>, StoreError> {
        let count = ends.len();
        let mut entries = PackedBuilder::<PutEndEntry>::with_capacity(count);
        let mut stripe_roots = Vec::new();
        for (entry, roots) in ends {
            entries.push(entry);
            stripe_roots.extend(roots);
        }
        let entries = entries.finish();
        let entries = Packed::decode(&entries, BATCH_KEYS_MAX).expect("made by us");
        let context = self.cluster.context(deadline);
        let request = PutEndRequest { context, entries, stripe_roots: &stripe_roots };
        let reply = master.link(&self.cluster)?.call(&request)?;
        let answer = OutcomesResponse::from_wire(&reply).map_err(StoreError::Answer)?;
        let outcomes = answer
            .into_result()
            .map_err(|context| StoreError::refused(context.code.unwrap_or(ErrorCode::Internal)))?;
        let codes: Vec<KeyResult<()>> =
            outcomes.codes.iter().map(|code| code.map_or(Ok(()), Err)).collect();
        if codes.len() != count {
            let (field, found, expected) = ("codes", codes.len(), count);
            return Err(StoreError::Answer(convert::ConvertError::Count { field, found, expected }));
        }
        Ok(codes)
    }

    /// What was written can be read at once where it is.
    pub(crate) fn remember_written(&self, writing: &Writing<'_>) {
        self.forget_object(&writing.granted.object.id);
        let all_well = writing.outcomes.iter().all(|outcome| *outcome == Some(Ok(())));
        let Some(roots) = writing.all_roots().filter(|_| all_well) else { return };
        let Granted { object, handles } = &writing.granted;
        let root = object_root(object.id, object.epoch, object.object_len, &roots);
        let with_root =
            |handle: &Handle| Handle { stripe_root: roots[usize::from(handle.stripe_index)], ..*handle };
        let located = Located {
            object: ObjectEntry { root, ..*object },
            handles: handles.iter().map(with_root).collect(),
        };
        if let Ok(placed) = Placed::new(located, None) {
            self.remember(&Arc::new(placed));
        }
    }
}

/// Room comes back within some milliseconds when something can be evicted.
const PAUSE_FOR_ROOM: Duration = Duration::from_millis(5);

/// Whether a failure is of a kind that another reservation may avoid.
fn is_lost(error: &StoreError) -> bool {
    use ErrorCode::*;
    matches!(error.code(), StaleEpoch | StaleTerm | StaleGeneration | StaleSession | Overlap)
        || matches!(error, StoreError::Node { source, .. } if is_of_connection(source))
}

/// One attributes section per key; empty when there is none.
fn sections(attributes: &[u8], keys: usize) -> Vec<u8> {
    if attributes.is_empty() {
        return Vec::new();
    }
    let mut packed = PackedBytesBuilder::new();
    for _ in 0..keys {
        packed.push(attributes).expect("bounded by the options' check");
    }
    packed.finish()
}
