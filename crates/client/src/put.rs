//! Puts: reservation at the master, transfer to the nodes, end at the master.
//!
//! ```text
//!   PutStart ─▶ for each node: Begin ─▶ bytes, digested in transit ─▶ Commit(root) ─▶ PutEnd(roots, outcomes)
//! ```
//!
//! Replicas and stripes are written to their nodes concurrently. A put is complete when PutEnd is acknowledged; a
//! replica is complete when all of its stripes are committed.

use std::sync::Arc;
use std::time::Duration;

use moontide_proto::convert::{
    self, CallerId, OutcomesResponse, PutConfig, PutEndRequest, PutStartRequest, PutStartResponse,
    RequestContext, Wire,
};
use moontide_proto::{
    Handle, ObjectEntry, Packed, PackedBuilder, PackedBytesBuilder, PackedKeysBuilder, PutEndEntry, PutEntry,
    v1,
};
use moontide_rt::time::Instant;
use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::record::object_root;
use moontide_types::{ErrorCode, Key, Medium};

use crate::cluster::{Master, Rounds, next_counter, random_u64};
use crate::config::{KEYS_PER_CALL, PutOptions};
use crate::error::StoreError;
use crate::link::KeyResult;
use crate::link::LookupEntry;
use crate::logic::{RETRY_BACKOFF, is_unanswered};
use crate::nodes::is_connection_error;
use crate::replica_list::ReplicaList;
use crate::store::{Inner, Store};
use crate::write::{ObjectWrite, Reservation};

/// Outcome of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The object is stored.
    Stored,
    /// An object of this key exists; nothing was changed.
    AlreadyExists,
}

/// One object of a batch.
#[derive(Clone, Copy, Debug)]
pub struct PutItem<'a> {
    /// Key of the object.
    pub key: &'a [u8],
    /// Bytes of the object, as consecutive parts.
    pub parts: &'a [&'a [u8]],
}

/// Pause before a put is retried whose node was unreachable. The pauses of all retries that the budget allows add up to
/// more than the backoff of a failed link.
const UNREACHABLE_PAUSE: Duration = Duration::from_millis(100);

impl Store {
    /// Stores an object.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<PutOutcome, StoreError> {
        self.put_with(key, &[value], &PutOptions::default())
    }

    /// Stores an object from several buffers.
    pub fn put_with(
        &self,
        key: &[u8],
        parts: &[&[u8]],
        options: &PutOptions,
    ) -> Result<PutOutcome, StoreError> {
        let outcomes = self.put_batch(&[PutItem { key, parts }], options);
        outcomes.into_iter().next().expect("one outcome per item")
    }

    /// Stores many objects; one outcome for each, in order.
    pub fn put_batch(
        &self,
        items: &[PutItem<'_>],
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, StoreError>> {
        self.inner.put_batch(items, options, self.inner.deadline())
    }
}

impl Inner {
    pub(crate) fn put_batch(
        &self,
        items: &[PutItem<'_>],
        options: &PutOptions,
        deadline: Instant,
    ) -> Vec<Result<PutOutcome, StoreError>> {
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
                Err(error) if error.code() != ErrorCode::Pending => {
                    metrics.puts_failed.inc();
                }
                Ok(PutOutcome::AlreadyExists) => {
                    metrics.puts_already_existed.inc();
                }
                // `Pending`: stored, but a node may return with the version that it replaces.
                Ok(PutOutcome::Stored) | Err(_) => {
                    let len: usize = item.parts.iter().map(|part| part.len()).sum();
                    metrics.bytes_written.inc_by(len as u64);
                }
            }
        }
        outcomes
    }
}

/// Parameters of a put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PutParams<'a> {
    pub(crate) caller: CallerId,
    pub(crate) options: &'a PutOptions,
    /// Attributes section of each object.
    pub(crate) attributes: &'a [u8],
    /// Kind of memory of an in-place write, whose bytes are not digested; `None` for ordinary puts.
    pub(crate) in_place: Option<Medium>,
}

/// Result of PutStart for a key.
pub(crate) enum PutStartOutcome {
    Granted(Reservation),
    Existed,
    /// Retry after a pause.
    RetryLater {
        code: ErrorCode,
        after: Duration,
    },
    /// The master did not respond in the first round.
    NoResponse(StoreError),
    Refused(StoreError),
}

impl Inner {
    /// Fails if fewer nodes are registered than replicas are required, or too few different ones: waiting would not help.
    fn check_nodes(&self, options: &PutOptions, deadline: Instant) -> Result<(), StoreError> {
        let (wanted, spread) = (usize::from(options.replicas_min), options.spread);
        if self.nodes.count_apart(spread) < wanted {
            self.refresh_nodes(deadline)?;
        }
        let nodes = self.nodes.count_apart(spread);
        match spread {
            _ if nodes >= wanted => Ok(()),
            Some(spread) => Err(StoreError::TooFewDomains { spread, wanted, domains: nodes }),
            None => Err(StoreError::TooFewNodes { wanted, nodes }),
        }
    }

    fn put_all(
        &self,
        items: &[PutItem<'_>],
        options: &PutOptions,
        deadline: Instant,
    ) -> Vec<Result<PutOutcome, StoreError>> {
        let mut attributes = Vec::new();
        options.attributes().encode(&mut attributes);
        let mut outcomes: Vec<Option<Result<PutOutcome, StoreError>>> = vec![None; items.len()];
        let mut last_errors: Vec<Option<StoreError>> = vec![None; items.len()];
        let mut backoff = RETRY_BACKOFF;
        items.iter().for_each(|_| self.budget.lock().earn());
        // One caller id per call: a retry may resume what this call has started, another call of this process may not.
        let params =
            PutParams { caller: CallerId(random_u64()), options, attributes: &attributes, in_place: None };
        // What other masters have granted is written before silent ones are asked again.
        let rounds = if items.len() > 1 { Rounds::One } else { Rounds::UntilDeadline };
        loop {
            let open: Vec<usize> = (0..items.len()).filter(|&at| outcomes[at].is_none()).collect();
            if open.is_empty() {
                return outcomes.into_iter().map(|outcome| outcome.expect("no item is open")).collect();
            }
            let mut pause = Duration::ZERO;
            for part in open.chunks(KEYS_PER_CALL) {
                let (outcomes, last_errors) = (&mut outcomes, &mut last_errors);
                let after = self.put_some(items, part, params, rounds, outcomes, last_errors, deadline);
                pause = pause.max(after);
            }
            if outcomes.iter().any(Option::is_none) {
                let pause = backoff.pause(pause, next_counter());
                if Instant::now() + pause >= deadline {
                    for (outcome, last) in
                        outcomes.iter_mut().zip(&mut last_errors).filter(|(o, _)| o.is_none())
                    {
                        *outcome = Some(Err(last.take().unwrap_or_else(|| self.timeout_error())));
                    }
                    continue;
                }
                self.metrics.retries.inc();
                std::thread::sleep(pause);
                let is_open = |(outcome, last): (&Option<_>, &Option<StoreError>)| {
                    outcome.is_none() && last.as_ref().is_some_and(|error| is_unanswered(error.code()))
                };
                if !self.cluster.is_single_master() && outcomes.iter().zip(&last_errors).any(is_open) {
                    self.cluster.refresh_map(self.cluster.masters().version(), deadline);
                }
            }
        }
    }

    /// Makes one attempt for some of the items. Returns the pause before the next one.
    #[expect(clippy::too_many_arguments, reason = "one step of put_all, which has all of them")]
    fn put_some(
        &self,
        items: &[PutItem<'_>],
        part: &[usize],
        params: PutParams<'_>,
        rounds: Rounds,
        outcomes: &mut [Option<Result<PutOutcome, StoreError>>],
        last_errors: &mut [Option<StoreError>],
        deadline: Instant,
    ) -> Duration {
        let mut valid: Vec<(usize, Key<'_>, u64)> = Vec::with_capacity(part.len());
        for &at in part {
            let len = items[at].parts.iter().map(|part| part.len() as u64).sum();
            match Key::new(items[at].key) {
                Ok(key) => valid.push((at, key, len)),
                Err(error) => outcomes[at] = Some(Err(error.into())),
            }
        }
        let keys: Vec<(Key<'_>, u64)> = valid.iter().map(|&(_, key, len)| (key, len)).collect();
        let started = match self.put_start(&keys, params, rounds, deadline) {
            Ok(started) => started,
            Err(error) => {
                let again = error.is_retryable();
                for &(at, ..) in &valid {
                    match again {
                        true => last_errors[at] = Some(error.clone()),
                        false => outcomes[at] = Some(Err(error.clone())),
                    }
                }
                return Duration::ZERO;
            }
        };
        let mut pause = Duration::ZERO;
        let (mut writes, mut indices) = (Vec::new(), Vec::new());
        for (&(at, key, _), start) in valid.iter().zip(started) {
            match start {
                PutStartOutcome::Existed => outcomes[at] = Some(Ok(PutOutcome::AlreadyExists)),
                PutStartOutcome::NoResponse(error) => last_errors[at] = Some(error),
                PutStartOutcome::Refused(error) => outcomes[at] = Some(Err(error)),
                PutStartOutcome::RetryLater { code, after } => {
                    last_errors[at] = Some(StoreError::refused(code));
                    pause = pause.max(after);
                }
                PutStartOutcome::Granted(reservation) => {
                    writes.push(ObjectWrite::new(key, reservation, items[at].parts, params.attributes));
                    indices.push(at);
                }
            }
        }
        self.write(&mut writes, deadline);
        let replicas_min = params.options.replicas_min;
        writes.iter_mut().for_each(|write| write.require_replicas(replicas_min));
        let ended = self.put_end(&mut writes, deadline);
        for ((at, ended), write) in indices.into_iter().zip(ended).zip(&mut writes) {
            match ended {
                Ok(()) => {
                    self.cache_written(write);
                    outcomes[at] = Some(Ok(PutOutcome::Stored));
                }
                // Stored, and final for this call: another attempt would replace it by the same bytes.
                Err(error) if error.code() == ErrorCode::Pending => {
                    self.cache_written(write);
                    outcomes[at] = Some(Err(error));
                }
                Err(error) => {
                    let error = match (write.last.take().unwrap_or(error), last_errors[at].take()) {
                        // The master waits for the node that failed in an earlier attempt.
                        (error, Some(earlier))
                            if matches!(error.code(), ErrorCode::DeadlineExceeded | ErrorCode::Retry) =>
                        {
                            earlier
                        }
                        (error, _) => error,
                    };
                    // The node left during the put: the master can place the object on another one.
                    let again = error.is_retryable()
                        || error.code() == ErrorCode::Gone
                        || needs_new_reservation(&error);
                    // An unreachable node is not tried again at once; other nodes may be, and so may it, later.
                    if error.code() == ErrorCode::Unreachable {
                        pause = pause.max(UNREACHABLE_PAUSE);
                    }
                    match again && self.budget.lock().spend() {
                        true => last_errors[at] = Some(error),
                        false => outcomes[at] = Some(Err(error)),
                    }
                }
            }
        }
        pause
    }

    /// Reserves space; one result per key.
    pub(crate) fn put_start(
        &self,
        keys: &[(Key<'_>, u64)],
        params: PutParams<'_>,
        rounds: Rounds,
        deadline: Instant,
    ) -> Result<Vec<PutStartOutcome>, StoreError> {
        let results = self.cluster.route_rounds(
            rounds,
            keys.len(),
            deadline,
            |at| self.local_nodes.id(keys[at].0),
            |master, part| {
                let keys: Vec<(Key<'_>, u64)> = part.iter().map(|&at| keys[at]).collect();
                self.put_start_at(master, &keys, params, deadline)
            },
        );
        let refused = |code| PutStartOutcome::Refused(StoreError::refused(code));
        let start = |result: Result<KeyResult<PutStartOutcome>, StoreError>| match result {
            Ok(start) => Ok(start.unwrap_or_else(refused)),
            // With one master a failed call fails all keys; with several, the reservations of the others remain valid.
            Err(error) if self.cluster.is_single_master() => Err(error),
            Err(error) if rounds == Rounds::One && is_unanswered(error.code()) => {
                Ok(PutStartOutcome::NoResponse(error))
            }
            Err(error) => Ok(PutStartOutcome::Refused(error)),
        };
        results.into_iter().map(start).collect()
    }

    /// Reserves space at one master; keys that it does not host get an error code.
    fn put_start_at(
        &self,
        master: &Master,
        keys: &[(Key<'_>, u64)],
        params: PutParams<'_>,
        deadline: Instant,
    ) -> Result<Vec<KeyResult<PutStartOutcome>>, StoreError> {
        let PutParams { caller, options, attributes, in_place } = params;
        let packing =
            |source| StoreError::InvalidResponse(convert::ConvertError::Packed { field: "keys", source });
        let mut packed = PackedKeysBuilder::new();
        for (key, _) in keys {
            packed.push(*key).map_err(packing)?;
        }
        let packed = packed.finish();
        let objects: PackedBuilder<PutEntry> =
            keys.iter().map(|&(_, len)| PutEntry { len, config: 0 }).collect();
        let objects = objects.finish();
        let sections = sections(attributes, keys.len());
        // Stripes are meant to be spread over nodes.
        let local_node =
            if options.prefer_local && options.stripes.is_none() { self.nodes.mapped() } else { None };
        let config = PutConfig {
            replicas: options.replicas,
            replicas_min: options.replicas_min,
            stripes: options.stripes,
            preferred: self.nodes.places(&options.prefer, local_node),
            local_node,
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
        let request = PutStartRequest::from_wire(&message).map_err(StoreError::InvalidResponse)?;
        let reply = master.link(&self.cluster, deadline)?.call(&request)?;
        let response = PutStartResponse::from_wire(&reply).map_err(StoreError::InvalidResponse)?;
        let retry_after = Duration::from_millis(response.context().retry_after_ms.into());
        let reservations = match response.into_result() {
            Ok(reservations) => reservations,
            Err(context) => {
                let code = context.code.unwrap_or(ErrorCode::Internal);
                return Err(StoreError::refused(code));
            }
        };
        let start = |(object, handles): (ObjectEntry, Packed<'_, Handle>)| match object.code {
            None => {
                self.learn_generation(object.tenant_generation);
                let (handles, replaces) = (handles.iter().collect(), options.upsert);
                Ok(PutStartOutcome::Granted(Reservation { object, handles, replaces }))
            }
            Some(ErrorCode::AlreadyExists) => Ok(PutStartOutcome::Existed),
            Some(ErrorCode::TooLarge) if object.object_len > 0 => {
                Ok(PutStartOutcome::Refused(StoreError::ObjectTooLarge { largest: object.object_len }))
            }
            Some(code @ (ErrorCode::NoSpace | ErrorCode::Busy | ErrorCode::Retry)) => {
                Ok(PutStartOutcome::RetryLater { code, after: retry_after.max(NO_SPACE_RETRY_DELAY) })
            }
            Some(code) => Err(code),
        };
        Ok(reservations.list.iter().map(start).collect())
    }

    /// Ends puts; one result each.
    pub(crate) fn put_end(
        &self,
        writes: &mut [ObjectWrite<'_>],
        deadline: Instant,
    ) -> Vec<Result<(), StoreError>> {
        let mut results: Vec<Option<Result<(), StoreError>>> = vec![None; writes.len()];
        let mut backoff = RETRY_BACKOFF;
        loop {
            let open: Vec<usize> = (0..writes.len()).filter(|&at| results[at].is_none()).collect();
            if open.is_empty() {
                return results.into_iter().map(|result| result.expect("no put is open")).collect();
            }
            for (&at, end) in open.iter().zip(self.put_end_once(writes, &open, deadline)) {
                results[at] = match end {
                    Ok(Ok(())) => Some(Ok(())),
                    Ok(Err(ErrorCode::Retry)) => None,
                    Ok(Err(code)) => Some(Err(StoreError::refused(code))),
                    // PutEnd is idempotent: it may be repeated whether or not the master received it.
                    Err(error) if error.is_retryable() && Instant::now() < deadline => None,
                    Err(error) => Some(Err(error)),
                };
            }
            if results.iter().any(Option::is_none) {
                let pause = backoff.pause(Duration::ZERO, next_counter());
                if Instant::now() + pause >= deadline {
                    let timed_out = || Some(Err(self.timeout_error()));
                    results
                        .iter_mut()
                        .filter(|result| result.is_none())
                        .for_each(|result| *result = timed_out());
                    continue;
                }
                std::thread::sleep(pause);
            }
        }
    }

    fn put_end_once(
        &self,
        writes: &[ObjectWrite<'_>],
        open: &[usize],
        deadline: Instant,
    ) -> Vec<Result<KeyResult<()>, StoreError>> {
        let ends: Vec<_> = open.iter().map(|&at| writes[at].end()).collect();
        self.cluster.route(
            ends.len(),
            deadline,
            |at| ends[at].0.id,
            |master, part| self.put_end_at(master, part.iter().map(|&at| &ends[at]), deadline),
        )
    }

    /// Ends puts at one master.
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
        let entries = Packed::decode(&entries, BATCH_KEYS_MAX).expect("packed above");
        let context = self.cluster.context(deadline);
        let request = PutEndRequest { context, entries, stripe_roots: &stripe_roots };
        let reply = master.link(&self.cluster, deadline)?.call(&request)?;
        let response = OutcomesResponse::from_wire(&reply).map_err(StoreError::InvalidResponse)?;
        let outcomes = response
            .into_result()
            .map_err(|context| StoreError::refused(context.code.unwrap_or(ErrorCode::Internal)))?;
        let codes: Vec<KeyResult<()>> = outcomes.codes.iter().map(|code| code.map_or(Ok(()), Err)).collect();
        if codes.len() != count {
            let (field, found, expected) = ("codes", codes.len(), count);
            return Err(StoreError::InvalidResponse(convert::ConvertError::Count { field, found, expected }));
        }
        Ok(codes)
    }

    /// Caches the location of a written object.
    pub(crate) fn cache_written(&self, write: &ObjectWrite<'_>) {
        self.forget_object(&write.reservation.object.id);
        let all_ok = write.outcomes.iter().all(|outcome| *outcome == Some(Ok(())));
        let Some(roots) = write.all_roots().filter(|_| all_ok) else { return };
        let Reservation { object, handles, .. } = &write.reservation;
        let root = object_root(object.id, object.epoch, object.object_len, &roots);
        let with_root =
            |handle: &Handle| Handle { stripe_root: roots[usize::from(handle.stripe_index)], ..*handle };
        let entry = LookupEntry {
            object: ObjectEntry { root, ..*object },
            handles: handles.iter().map(with_root).collect(),
        };
        if let Ok(location) = ReplicaList::new(entry, None) {
            self.cache_location(&Arc::new(location));
        }
    }
}

/// Shortest pause before a retry of a put that found no space: nodes confirm an eviction within about a millisecond.
const NO_SPACE_RETRY_DELAY: Duration = Duration::from_millis(1);

/// Returns whether another reservation may avoid the failure. `PermissionDenied`: the put took so long that its node no
/// longer accepts the capability.
fn needs_new_reservation(error: &StoreError) -> bool {
    use ErrorCode::*;
    matches!(
        error.code(),
        StaleEpoch | StaleTerm | StaleGeneration | StaleSession | Overlap | PermissionDenied
    ) || matches!(error, StoreError::Node { source, .. } if is_connection_error(source))
}

/// Packs one attributes section per key; empty if there are no attributes.
fn sections(attributes: &[u8], keys: usize) -> Vec<u8> {
    if attributes.is_empty() {
        return Vec::new();
    }
    let mut packed = PackedBytesBuilder::new();
    for _ in 0..keys {
        packed.push(attributes).expect("limited by PutOptions::validate");
    }
    packed.finish()
}
