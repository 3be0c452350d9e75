//! The calls of readers and writers that never wait.

use moontide_meta::{
    Effects, Found, Medium as MetaMedium, ObjectView, PlaceView, PutEnd, PutOptions, PutStart,
};
use moontide_proto::convert::{
    ExistRequest, GetReplicaListRequest, ListKind, ObjectListBuilder, PrefetchRequest, PutConfig,
    PutEndRequest, PutRevokeRequest, PutStartRequest, SetPinRequest, TouchRequest, Wire,
};
use moontide_proto::limits::HANDLES_PER_ANSWER_MAX;
use moontide_proto::{Capability, Handle, HandleFlags, Medium, ObjectEntry, ObjectFlags, v1};
use moontide_types::bounds::{REPLICAS_MAX, STRIPES_MAX};
use moontide_types::record::{Attributes, AttributesRef, ParentHash};
use moontide_types::{ErrorCode, Generation, SegmentId, SlotId, TenantGeneration, Term};

use super::{Caller, Codes, Service, refused};

impl Service {
    /// Which keys are complete objects?
    pub fn exist(&self, m: &v1::ExistRequest) -> v1::ExistResponse {
        let understood = ExistRequest::from_wire(m)
            .map_err(refused)
            .and_then(|request| Ok((self.caller(request.context)?, request.keys)));
        let (caller, keys) = match understood {
            Ok(understood) => understood,
            Err(code) => {
                return v1::ExistResponse { context: Some(self.refusal(code)), ..Default::default() };
            }
        };
        let now = self.now();
        let sorted = self.sort(&caller, keys);
        let mut present = vec![0u8; keys.len().div_ceil(8)];
        let mut failed: Option<Codes> = None;
        for (group, asks, positions) in sorted.parts() {
            match self.group(group) {
                Ok(mut group) => group.exist(now, asks, |index, there| {
                    let position = positions[index] as usize;
                    present[position / 8] |= u8::from(there) << (position % 8);
                }),
                Err(code) => {
                    let codes = failed.get_or_insert_with(|| Codes::new(keys.len()));
                    positions.iter().for_each(|&position| codes.set(position as usize, Some(code)));
                }
            }
        }
        v1::ExistResponse {
            context: Some(self.context(Some(&caller))),
            count: keys.len() as u32, // ≤ BATCH_KEYS_MAX
            present: present.into(),
            codes: failed.map_or_else(Default::default, |codes| codes.0.into()),
        }
    }

    /// Where are the bytes?
    pub fn get_replica_list(&self, m: &v1::GetReplicaListRequest) -> v1::GetReplicaListResponse {
        let understood = GetReplicaListRequest::from_wire(m)
            .map_err(refused)
            .and_then(|request| Ok((self.caller(request.context)?, request)));
        let (caller, request) = match understood {
            Ok(understood) => understood,
            Err(code) => {
                return v1::GetReplicaListResponse {
                    context: Some(self.refusal(code)),
                    ..Default::default()
                };
            }
        };
        let now = self.now();
        let sorted = self.sort(&caller, request.keys);
        let mut answers = Answers::new(self, &caller, request.keys.len());
        // A lease is a promise for all masters of the group, and one that is not sure to be among them gives none.
        let unconfirmed = self.is_unconfirmed();
        let lease_ms = if unconfirmed { 0 } else { request.lease_ms };
        for (group, asks, positions) in sorted.parts() {
            match self.group(group) {
                Ok(mut group) => {
                    let term = group.term();
                    group.lookup(now, lease_ms, asks, |index, found| {
                        // Of an empty object no node is asked: only who is sure may say that it is there.
                        let found = match found {
                            Ok(object) if unconfirmed && object.object_len == 0 => Err(ErrorCode::Retry),
                            found => found,
                        };
                        // A node refuses a read by a term that it has not heard of.
                        let inherited = found.as_ref().is_ok_and(|object| object.inherited);
                        let term = if inherited { Term::ZERO } else { term };
                        answers.add(positions[index], term, found, lease_ms, request.attributes);
                    });
                }
                Err(code) => positions.iter().for_each(|&position| answers.fail(position, code)),
            }
        }
        let fields = answers.finish();
        v1::GetReplicaListResponse {
            context: Some(self.context(Some(&caller))),
            objects: fields.objects,
            handles: fields.handles,
            attributes: if request.attributes { fields.attributes } else { Default::default() },
        }
    }

    /// Reserves space.
    pub fn put_start(&self, m: &v1::PutStartRequest) -> v1::PutStartResponse {
        let understood = PutStartRequest::from_wire(m)
            .map_err(refused)
            .and_then(|request| Ok((self.caller(request.context)?, request)));
        let (caller, request) = match understood {
            Ok(understood) => understood,
            Err(code) => {
                return v1::PutStartResponse { context: Some(self.refusal(code)), ..Default::default() };
            }
        };
        let now = self.now();
        let options: Vec<PutOptions> = request.configs.iter().map(put_options).collect();
        let sorted = self.sort(&caller, request.keys);
        let entries: Vec<_> = request.objects.iter().collect();
        let sections: Vec<(AttributesRef<'_>, u32)> = match &request.attributes {
            // A section has at most 4,096 bytes.
            Some(sections) => sections.iter().map(|s| (s.decode_ref(), s.as_bytes().len() as u32)).collect(),
            None => vec![],
        };
        let mut answers = Answers::new(self, &caller, request.keys.len());
        let mut expires = vec![0u64; request.keys.len()];
        let mut effects = Effects::new();
        for (index, asks, positions) in sorted.parts() {
            let mut group = match self.group(index) {
                Ok(group) => group,
                Err(code) => {
                    positions.iter().for_each(|&position| answers.fail(position, code));
                    continue;
                }
            };
            let term = group.term();
            let tenant = group.tenant(caller.context.tenant);
            for (ask, &position) in asks.iter().zip(positions) {
                let at = position as usize;
                let (attributes, attributes_len) = sections.get(at).copied().unwrap_or_default();
                if answers.is_full(REPLICAS_MAX * STRIPES_MAX) {
                    // Before space is reserved that the caller would not hear of.
                    answers.fail(position, ErrorCode::Retry);
                    continue;
                }
                let started = tenant.and_then(|tenant| {
                    let put = PutStart {
                        ask: *ask,
                        tenant,
                        caller: caller.context.caller.0,
                        object_len: entries[at].len,
                        attributes_len,
                        pin: attributes.pin,
                        expires: attributes.expires,
                        cohort: attributes.cohort,
                        parent: attributes.parent,
                        options: &options[usize::from(entries[at].config)],
                    };
                    group.put_start(now, &put, &mut effects)
                });
                match started {
                    Ok(reservation) => {
                        expires[at] = reservation.object.expires.map_or(0, |at| at.0);
                        let window_ms = reservation.window.as_millis() as u32; // ≤ RESERVATION_MS_MAX
                        answers.add(position, term, Ok(reservation.object), window_ms, false);
                    }
                    Err(code) => answers.fail(position, code),
                }
            }
            self.deliver(&group, &mut effects);
        }
        let some_expire = expires.iter().any(|&at| at != 0);
        let fields = answers.finish();
        v1::PutStartResponse {
            context: Some(self.context(Some(&caller))),
            objects: fields.objects,
            handles: fields.handles,
            expires_unix_ms: if some_expire { expires } else { vec![] },
        }
    }

    /// Ends puts.
    pub fn put_end(&self, m: &v1::PutEndRequest) -> v1::OutcomesResponse {
        let request = PutEndRequest::from_wire(m).map_err(refused);
        self.outcomes(request.map(|r| (r.context, r)), |_, request, codes| {
            let now = self.now();
            let mut effects = Effects::new();
            *codes = Codes::new(request.entries.len());
            for (at, (entry, stripe_roots)) in request.iter().enumerate() {
                let index = self.group_of(entry.id);
                let end = PutEnd {
                    id: entry.id,
                    epoch: entry.epoch,
                    root: entry.root,
                    outcomes: &entry.outcomes[..entry.replica_count.into()],
                    stripe_roots,
                };
                let ended = self.group(index).and_then(|mut group| {
                    let ended = group.put_end(now, &end, &mut effects);
                    self.deliver(&group, &mut effects);
                    ended
                });
                codes.set(at, ended.err());
            }
        })
    }

    /// Gives reservations back.
    pub fn put_revoke(&self, m: &v1::PutRevokeRequest) -> v1::OutcomesResponse {
        let request = PutRevokeRequest::from_wire(m).map_err(refused);
        self.outcomes(request.map(|r| (r.context, r)), |_, request, codes| {
            let now = self.now();
            let mut effects = Effects::new();
            *codes = Codes::new(request.versions.len());
            for (at, version) in request.versions.iter().enumerate() {
                let index = self.group_of(version.id);
                let revoked = self.group(index).and_then(|mut group| {
                    let revoked = group.put_revoke(now, version.id, version.epoch, &mut effects);
                    self.deliver(&group, &mut effects);
                    revoked
                });
                codes.set(at, revoked.err());
            }
        })
    }

    /// Marks objects as used.
    pub fn touch(&self, m: &v1::TouchRequest) -> v1::OutcomesResponse {
        let request = TouchRequest::from_wire(m).map_err(refused);
        self.outcomes(request.map(|r| (r.context, r)), |caller, request, codes| {
            let now = self.now();
            *codes = Codes::new(request.keys.len());
            for (group, asks, positions) in self.sort(caller, request.keys).parts() {
                let mut group = self.group(group);
                for (ask, &position) in asks.iter().zip(positions) {
                    let done = group
                        .as_mut()
                        .map_err(|code| *code)
                        .and_then(|group| group.touch(now, request.lease_ms, ask));
                    codes.set(position as usize, done.err());
                }
            }
        })
    }

    /// Changes how strongly objects resist eviction.
    pub fn set_pin(&self, m: &v1::SetPinRequest) -> v1::OutcomesResponse {
        let request = SetPinRequest::from_wire(m).map_err(refused);
        self.outcomes(request.map(|r| (r.context, r)), |caller, request, codes| {
            let now = self.now();
            *codes = Codes::new(request.keys.len());
            for (group, asks, positions) in self.sort(caller, request.keys).parts() {
                let mut group = self.group(group);
                for (ask, &position) in asks.iter().zip(positions) {
                    let done = group
                        .as_mut()
                        .map_err(|code| *code)
                        .and_then(|group| group.set_pin(now, ask, request.pin));
                    codes.set(position as usize, done.err());
                }
            }
        })
    }

    /// Brings objects from disk to memory ahead of need. Done when it is on its way, or there is nothing to bring.
    pub fn prefetch(&self, m: &v1::PrefetchRequest) -> v1::OutcomesResponse {
        let request = PrefetchRequest::from_wire(m).map_err(refused);
        self.outcomes(request.map(|r| (r.context, r)), |caller, request, codes| {
            let now = self.now();
            *codes = Codes::new(request.keys.len());
            for (group, asks, positions) in self.sort(caller, request.keys).parts() {
                let mut group = self.group(group);
                for (ask, &position) in asks.iter().zip(positions) {
                    let done =
                        group.as_mut().map_err(|code| *code).and_then(|group| group.prefetch(now, ask));
                    codes.set(position as usize, done.err());
                }
            }
        })
    }

    /// The frame of calls that answer with nothing but a code per entry.
    pub(super) fn outcomes<'a, R>(
        &self,
        request: Result<(moontide_proto::convert::RequestContext<'a>, R), ErrorCode>,
        work: impl FnOnce(&Caller<'a>, R, &mut Codes),
    ) -> v1::OutcomesResponse {
        let understood = request.and_then(|(context, request)| Ok((self.caller(context)?, request)));
        match understood {
            Ok((caller, request)) => {
                let mut codes = Codes::new(0);
                work(&caller, request, &mut codes);
                v1::OutcomesResponse { context: Some(self.context(Some(&caller))), codes: codes.0.into() }
            }
            Err(code) => {
                v1::OutcomesResponse { context: Some(self.refusal(code)), codes: Default::default() }
            }
        }
    }
}

/// The group's view of a configuration.
fn put_options(config: &PutConfig) -> PutOptions {
    PutOptions {
        replicas: config.replicas,
        replicas_min: config.replicas_min,
        stripes: config.stripes,
        local_node: config.local_node,
        preferred_segments: config.preferred_segments.iter().map(|s| (s.node, s.segment)).collect(),
        preferred_nodes: config.preferred_nodes.clone(),
        upsert: config.upsert,
        one_sided: config.one_sided,
        digestless: config.digestless,
        medium: match config.medium {
            Some(Medium::Device) => MetaMedium::Device,
            Some(Medium::Disk) => MetaMedium::Disk,
            Some(Medium::Memory) | None => MetaMedium::Memory,
        },
        ttl_ms: config.ttl_ms,
    }
}

/// Answers of a lookup or of the start of a put: gathered group by group, given in the order of the keys.
struct Answers {
    id_key: u32,
    generation: TenantGeneration,
    entries: Vec<ObjectEntry>,
    /// For each key: first handle, and where its attributes end.
    handles: Vec<Handle>,
    attributes: Vec<(u32, Vec<u8>)>,
}

impl Answers {
    fn new(service: &Service, caller: &Caller<'_>, keys: usize) -> Answers {
        Answers {
            id_key: service.config.id_key.number(),
            generation: caller.generation,
            entries: vec![ObjectEntry::failed(ErrorCode::NotFound, 0); keys],
            handles: Vec::with_capacity(keys),
            attributes: vec![],
        }
    }

    /// Whether so many more handles are too many for one answer.
    fn is_full(&self, more: usize) -> bool {
        self.handles.len() + more > HANDLES_PER_ANSWER_MAX
    }

    fn fail(&mut self, position: u32, code: ErrorCode) {
        self.entries[position as usize] = ObjectEntry::failed(code, 0);
    }

    /// `term`: of the object's group.
    fn add(&mut self, position: u32, term: Term, found: Found<'_>, window_ms: u32, attributes: bool) {
        let found = found.and_then(|object| {
            if self.is_full(object.places.len()) { Err(ErrorCode::Retry) } else { Ok(object) }
        });
        let object = match found {
            Ok(object) => object,
            Err(code) => return self.fail(position, code),
        };
        self.entries[position as usize] = ObjectEntry {
            code: None,
            flags: object_flags(&object),
            window_ms,
            id: object.id,
            epoch: object.epoch,
            object_len: object.object_len,
            root: object.root,
            first_handle: self.handles.len() as u32,
            handle_count: object.places.len() as u16, // ≤ REPLICAS_MAX × STRIPES_MAX
            replica_count: object.replicas,
            form: 0,
            tenant_generation: self.generation,
            id_key: self.id_key,
        };
        let digestless = object.digestless;
        self.handles.extend(object.places.iter().map(|place| handle(place, term, digestless)));
        if attributes {
            let section = attribute_section(&object);
            if !section.is_empty() {
                self.attributes.push((position, section));
            }
        }
    }

    /// Packs everything; keys for which there is no room any more are answered with `Retry`.
    fn finish(mut self) -> moontide_proto::convert::ObjectFields {
        self.attributes.sort_by_key(|&(position, _)| position);
        let mut attributes = self.attributes.iter().peekable();
        let mut list = ObjectListBuilder::with_capacity(ListKind::Answer, self.entries.len());
        for (position, entry) in (0u32..).zip(&self.entries) {
            let first = entry.first_handle as usize;
            let handles = &self.handles[first..first + usize::from(entry.handle_count)];
            let section =
                attributes.next_if(|(at, _)| *at == position).map_or(&[][..], |(_, section)| section);
            if list.push(*entry, handles, section).is_err() {
                let again = ObjectEntry::failed(ErrorCode::Retry, 0);
                list.push(again, &[], &[]).expect("an entry without handles always fits");
            }
        }
        list.finish()
    }
}

fn object_flags(object: &ObjectView<'_>) -> ObjectFlags {
    let mut flags = ObjectFlags::NONE;
    if object.fewer_replicas {
        flags = flags.with(ObjectFlags::FEWER_REPLICAS);
    }
    if object.digestless {
        flags = flags.with(ObjectFlags::DIGESTLESS);
    }
    flags
}

/// A place as it travels. Capabilities are empty while nobody has to prove anything.
pub(crate) fn handle(place: &PlaceView, term: Term, digestless: bool) -> Handle {
    let mut flags = HandleFlags::NONE;
    if digestless {
        flags = flags.with(HandleFlags::DIGESTLESS);
    }
    if place.verify {
        flags = flags.with(HandleFlags::VERIFY);
    }
    // A record on disk is named by its version; where it stands is its node's business.
    let on_disk = place.medium == MetaMedium::Disk;
    let nowhere = (SegmentId(0), SlotId(0), Generation(0));
    let (segment, slot, generation) =
        if on_disk { nowhere } else { (place.segment, place.slot, place.generation) };
    Handle {
        node: place.node,
        segment,
        slot,
        generation,
        extent: place.extent,
        payload_offset: place.payload_offset(),
        stripe_offset: place.stripe.offset,
        stripe_len: place.stripe.len,
        stripe_root: place.root,
        capability: Capability::default(),
        term,
        stripe_index: place.stripe.index,
        stripe_count: place.stripe.count,
        replica: place.replica,
        medium: match place.medium {
            MetaMedium::Memory => Medium::Memory,
            MetaMedium::Device => Medium::Device,
            MetaMedium::Disk => Medium::Disk,
        },
        flags,
    }
}

/// Attributes as the index knows them: without the note, which only the record has.
fn attribute_section(object: &ObjectView<'_>) -> Vec<u8> {
    let attributes = Attributes {
        pin: object.pin,
        expires: object.expires,
        cohort: object.cohort.map(Into::into),
        parent: object.parent.and_then(ParentHash::new),
        note: None,
    };
    let mut section = vec![];
    attributes.encode(&mut section);
    section
}
