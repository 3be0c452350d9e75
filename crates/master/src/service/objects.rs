//! Calls of readers and writers that never wait.

use moontide_meta::{Effects, LookupResult, ObjectView, PutEnd, PutOptions, PutStart, StripeLocation};
use moontide_proto::convert::{
    ExistRequest, GetReplicaListRequest, ObjectListBuilder, ObjectListKind, PrefetchRequest, PutConfig,
    PutEndRequest, PutRevokeRequest, PutStartRequest, SetPinRequest, TouchRequest, Wire,
};
use moontide_proto::limits::HANDLES_PER_RESPONSE_MAX;
use moontide_proto::{
    Capability, CapabilityKey, Handle, HandleFlags, ObjectEntry, ObjectFlags, PutEndFlags, v1,
};
use moontide_types::limits::{REPLICAS_MAX, STRIPES_MAX};
use moontide_types::record::{Attributes, AttributesRef, ParentHash};
use moontide_types::{ErrorCode, Generation, Medium, SegmentId, SlotId, TenantGeneration, Term};

use super::signing::{GrantedRight, KeysOfGroup, sign_handles};
use super::{CallContext, OutcomeCodes, Service, refused};

impl Service {
    /// Checks which keys are complete objects.
    pub fn exist(&self, m: &v1::ExistRequest) -> v1::ExistResponse {
        let parsed = ExistRequest::from_wire(m)
            .map_err(refused)
            .and_then(|request| Ok((self.caller(request.context)?, request.keys)));
        let (caller, keys) = match parsed {
            Ok(parsed) => parsed,
            Err(code) => {
                return v1::ExistResponse { context: Some(self.refusal(code)), ..Default::default() };
            }
        };
        let now = self.now();
        let sorted = self.sort(&caller, keys);
        let mut present = vec![0u8; keys.len().div_ceil(8)];
        let mut failed: Option<OutcomeCodes> = None;
        for (group, lookups, positions) in sorted.parts() {
            match self.group(group) {
                Ok(mut group) => group.exist(now, lookups, |index, exists| {
                    let position = positions[index] as usize;
                    present[position / 8] |= u8::from(exists) << (position % 8);
                }),
                Err(code) => {
                    let codes = failed.get_or_insert_with(|| OutcomeCodes::new(keys.len()));
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

    /// Looks up the locations of objects.
    pub fn get_replica_list(&self, m: &v1::GetReplicaListRequest) -> v1::GetReplicaListResponse {
        let parsed = GetReplicaListRequest::from_wire(m)
            .map_err(refused)
            .and_then(|request| Ok((self.caller(request.context)?, request)));
        let (caller, request) = match parsed {
            Ok(parsed) => parsed,
            Err(code) => {
                return v1::GetReplicaListResponse {
                    context: Some(self.refusal(code)),
                    ..Default::default()
                };
            }
        };
        let now = self.now();
        let sorted = self.sort(&caller, request.keys);
        let mut response = ObjectListResponse::new(self, &caller, request.keys.len(), GrantedRight::Read);
        // A lease binds all later masters of the group, so an unconfirmed master grants none.
        let unconfirmed = self.is_unconfirmed();
        let lease_ms = if unconfirmed { 0 } else { request.lease_ms };
        for (index, lookups, positions) in sorted.parts() {
            match self.group(index) {
                Ok(mut group) => {
                    let (term, keys) = (group.term(), self.signer.keys(index));
                    group.lookup(now, lease_ms, lookups, |index, found| {
                        // A read of an empty object involves no node that could fence it: only a confirmed master
                        // reports it.
                        let found = match found {
                            Ok(object) if unconfirmed && object.object_len == 0 => Err(ErrorCode::Retry),
                            found => found,
                        };
                        // The node may not know the new term yet, and would refuse a read with it.
                        let from_handoff = found.as_ref().is_ok_and(|object| object.from_handoff);
                        let term = if from_handoff { Term::ZERO } else { term };
                        response.add(positions[index], (term, &keys), found, lease_ms, request.attributes);
                    });
                }
                Err(code) => positions.iter().for_each(|&position| response.fail(position, code)),
            }
        }
        let fields = response.finish();
        v1::GetReplicaListResponse {
            context: Some(self.context(Some(&caller))),
            objects: fields.objects,
            handles: fields.handles,
            attributes: if request.attributes { fields.attributes } else { Default::default() },
        }
    }

    /// Reserves space for objects.
    pub fn put_start(&self, m: &v1::PutStartRequest) -> v1::PutStartResponse {
        let parsed = PutStartRequest::from_wire(m)
            .map_err(refused)
            .and_then(|request| Ok((self.caller(request.context)?, request)));
        let (caller, request) = match parsed {
            Ok(parsed) => parsed,
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
        let mut response = ObjectListResponse::new(self, &caller, request.keys.len(), GrantedRight::Write);
        let mut expires = vec![0u64; request.keys.len()];
        let mut effects = Effects::new();
        for (index, lookups, positions) in sorted.parts() {
            let mut group = match self.group(index) {
                Ok(group) => group,
                Err(code) => {
                    positions.iter().for_each(|&position| response.fail(position, code));
                    continue;
                }
            };
            let (term, keys) = (group.term(), self.signer.keys(index));
            let tenant = group.tenant(caller.context.tenant);
            let mut largest = None;
            for (lookup, &position) in lookups.iter().zip(positions) {
                let at = position as usize;
                let (attributes, attributes_len) = sections.get(at).copied().unwrap_or_default();
                if response.is_full(REPLICAS_MAX * STRIPES_MAX) {
                    // Before the reservation: the response could not contain it.
                    response.fail(position, ErrorCode::Retry);
                    continue;
                }
                let put = tenant.map(|tenant| PutStart {
                    object: *lookup,
                    tenant,
                    caller: caller.context.caller.0,
                    object_len: entries[at].len,
                    attributes_len,
                    pin: attributes.pin,
                    spread: attributes.spread,
                    disk_replicas: attributes.disk_replicas,
                    expires: attributes.expires,
                    cohort: attributes.cohort,
                    parent: attributes.parent,
                    options: &options[usize::from(entries[at].config)],
                });
                let started = put.and_then(|put| group.put_start(now, &put, &mut effects));
                match started {
                    Ok(reservation) => {
                        expires[at] = reservation.object.expires.map_or(0, |at| at.0);
                        let valid_ms = reservation.window.as_millis() as u32; // ≤ RESERVATION_MS_MAX
                        response.add(position, (term, &keys), Ok(reservation.object), valid_ms, false);
                    }
                    Err(code) => {
                        let too_large = put.ok().filter(|_| code == ErrorCode::TooLarge);
                        // One search for the whole batch: most batches have one configuration.
                        let largest = too_large.map(|put| {
                            *largest.get_or_insert_with(|| group.largest_object(&put).unwrap_or(0))
                        });
                        let largest = largest.filter(|&largest| largest < entries[at].len);
                        response.refuse_put(position, code, largest.unwrap_or(0));
                    }
                }
            }
            drop(keys);
            self.deliver(&group, &mut effects);
        }
        let some_expire = expires.iter().any(|&at| at != 0);
        let fields = response.finish();
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
        self.outcomes(request.map(|r| (r.context, r)), |caller, request, codes| {
            let now = self.now();
            let mut effects = Effects::new();
            *codes = OutcomeCodes::new(request.entries.len());
            // The entries of a batch are the blocks of a prompt, in order. The last one ends first, so that eviction takes it
            // before its predecessors: without them it is worth nothing.
            let entries: Vec<_> = request.iter().enumerate().collect();
            let mut replaced = vec![];
            for (at, (entry, stripe_roots)) in entries.into_iter().rev() {
                let index = self.group_of(entry.id);
                let end = PutEnd {
                    id: entry.id,
                    epoch: entry.epoch,
                    root: entry.root,
                    outcomes: &entry.outcomes[..entry.replica_count.into()],
                    stripe_roots,
                    replaces: entry.flags.contains(PutEndFlags::REPLACES),
                };
                let ended = self.group(index).and_then(|mut group| {
                    group.check_tenant(now, entry.id, caller.context.tenant)?;
                    let ended = group.put_end(now, &end, &mut effects);
                    self.deliver(&group, &mut effects);
                    ended
                });
                replaced.extend((end.replaces && ended.is_ok()).then_some(at));
                codes.set(at, ended.err());
            }
            // Another master may own the group already, with objects that this master does not know.
            if self.is_unconfirmed() {
                replaced.into_iter().for_each(|at| codes.set(at, Some(ErrorCode::Pending)));
            }
        })
    }

    /// Revokes reservations.
    pub fn put_revoke(&self, m: &v1::PutRevokeRequest) -> v1::OutcomesResponse {
        let request = PutRevokeRequest::from_wire(m).map_err(refused);
        self.outcomes(request.map(|r| (r.context, r)), |caller, request, codes| {
            let now = self.now();
            let mut effects = Effects::new();
            *codes = OutcomeCodes::new(request.versions.len());
            for (at, version) in request.versions.iter().enumerate() {
                let index = self.group_of(version.id);
                let revoked = self.group(index).and_then(|mut group| {
                    let tenant = caller.context.tenant;
                    group.check_tenant(now, version.id, tenant).map_err(|_| ErrorCode::Gone)?;
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
            *codes = OutcomeCodes::new(request.keys.len());
            for (group, lookups, positions) in self.sort(caller, request.keys).parts() {
                let mut group = self.group(group);
                for (lookup, &position) in lookups.iter().zip(positions) {
                    let done = group
                        .as_mut()
                        .map_err(|code| *code)
                        .and_then(|group| group.touch(now, request.lease_ms, lookup));
                    codes.set(position as usize, done.err());
                }
            }
        })
    }

    /// Changes the pin class of objects.
    pub fn set_pin(&self, m: &v1::SetPinRequest) -> v1::OutcomesResponse {
        let request = SetPinRequest::from_wire(m).map_err(refused);
        self.outcomes(request.map(|r| (r.context, r)), |caller, request, codes| {
            let now = self.now();
            *codes = OutcomeCodes::new(request.keys.len());
            for (group, lookups, positions) in self.sort(caller, request.keys).parts() {
                let mut group = self.group(group);
                for (lookup, &position) in lookups.iter().zip(positions) {
                    let done = group
                        .as_mut()
                        .map_err(|code| *code)
                        .and_then(|group| group.set_pin(now, lookup, request.pin));
                    codes.set(position as usize, done.err());
                }
            }
        })
    }

    /// Starts the promotion of objects from disk to memory. Succeeds if it has started, or if there is nothing to
    /// promote.
    pub fn prefetch(&self, m: &v1::PrefetchRequest) -> v1::OutcomesResponse {
        let request = PrefetchRequest::from_wire(m).map_err(refused);
        self.outcomes(request.map(|r| (r.context, r)), |caller, request, codes| {
            let now = self.now();
            *codes = OutcomeCodes::new(request.keys.len());
            for (group, lookups, positions) in self.sort(caller, request.keys).parts() {
                let mut group = self.group(group);
                for (lookup, &position) in lookups.iter().zip(positions) {
                    let done =
                        group.as_mut().map_err(|code| *code).and_then(|group| group.prefetch(now, lookup));
                    codes.set(position as usize, done.err());
                }
            }
        })
    }

    /// Common part of calls whose response is one code per entry.
    pub(super) fn outcomes<'a, R>(
        &self,
        request: Result<(moontide_proto::convert::RequestContext<'a>, R), ErrorCode>,
        work: impl FnOnce(&CallContext<'a>, R, &mut OutcomeCodes),
    ) -> v1::OutcomesResponse {
        let parsed = request.and_then(|(context, request)| Ok((self.caller(context)?, request)));
        match parsed {
            Ok((caller, request)) => {
                let mut codes = OutcomeCodes::new(0);
                work(&caller, request, &mut codes);
                v1::OutcomesResponse { context: Some(self.context(Some(&caller))), codes: codes.0.into() }
            }
            Err(code) => {
                v1::OutcomesResponse { context: Some(self.refusal(code)), codes: Default::default() }
            }
        }
    }
}

/// Converts a configuration to the type of `moontide_meta`.
fn put_options(config: &PutConfig) -> PutOptions {
    PutOptions {
        replicas: config.replicas,
        replicas_min: config.replicas_min,
        stripes: config.stripes,
        local_node: config.local_node,
        preferred: config.preferred.clone(),
        upsert: config.upsert,
        one_sided: config.one_sided,
        digestless: config.digestless,
        medium: config.medium.unwrap_or_default(),
        ttl_ms: config.ttl_ms,
    }
}

/// Response of a lookup or a PutStart: collected group by group, returned in the order of the keys.
struct ObjectListResponse {
    id_key: u32,
    generation: TenantGeneration,
    right: GrantedRight,
    entries: Vec<ObjectEntry>,
    /// Handles of all entries; `first_handle` of an entry is its index here.
    handles: Vec<Handle>,
    /// Key of the node of each handle.
    keys: Vec<Option<CapabilityKey>>,
    /// Positions of keys with their attributes sections.
    attributes: Vec<(u32, Vec<u8>)>,
}

impl ObjectListResponse {
    fn new(
        service: &Service,
        caller: &CallContext<'_>,
        keys: usize,
        right: GrantedRight,
    ) -> ObjectListResponse {
        ObjectListResponse {
            id_key: service.config.id_key.number(),
            generation: caller.generation,
            right,
            entries: vec![ObjectEntry::failed(ErrorCode::NotFound, 0); keys],
            handles: Vec::with_capacity(keys),
            keys: Vec::with_capacity(keys),
            attributes: vec![],
        }
    }

    /// Returns whether `more` handles do not fit into the response.
    fn is_full(&self, more: usize) -> bool {
        self.handles.len() + more > HANDLES_PER_RESPONSE_MAX
    }

    fn fail(&mut self, position: u32, code: ErrorCode) {
        self.entries[position as usize] = ObjectEntry::failed(code, 0);
    }

    fn refuse_put(&mut self, position: u32, code: ErrorCode, largest: u64) {
        self.entries[position as usize] = ObjectEntry { object_len: largest, ..ObjectEntry::failed(code, 0) };
    }

    /// Adds the result of a lookup. `term` and `keys` are those of the object's group.
    fn add(
        &mut self,
        position: u32,
        (term, keys): (Term, &KeysOfGroup<'_>),
        found: LookupResult<'_>,
        valid_ms: u32,
        attributes: bool,
    ) {
        let found = found.and_then(|object| {
            if self.is_full(object.locations.len()) { Err(ErrorCode::Retry) } else { Ok(object) }
        });
        let object = match found {
            Ok(object) => object,
            Err(code) => return self.fail(position, code),
        };
        self.entries[position as usize] = ObjectEntry {
            code: None,
            flags: object_flags(&object),
            valid_ms,
            id: object.id,
            epoch: object.epoch,
            object_len: object.object_len,
            root: object.root,
            first_handle: self.handles.len() as u32,
            handle_count: object.locations.len() as u16, // ≤ REPLICAS_MAX × STRIPES_MAX
            replica_count: object.replicas,
            format: 0,
            tenant_generation: self.generation,
            id_key: self.id_key,
        };
        let digestless = object.digestless;
        self.handles.extend(object.locations.iter().map(|location| handle(location, term, digestless)));
        self.keys.extend(object.locations.iter().map(|location| keys.of(location.node).cloned()));
        if attributes {
            let section = attribute_section(&object);
            if !section.is_empty() {
                self.attributes.push((position, section));
            }
        }
    }

    /// Encodes the response; keys that do not fit get `Retry`.
    fn finish(mut self) -> moontide_proto::convert::ObjectFields {
        sign_handles(self.right, &self.entries, &mut self.handles, &self.keys);
        self.attributes.sort_by_key(|&(position, _)| position);
        let mut attributes = self.attributes.iter().peekable();
        let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Response, self.entries.len());
        for (position, entry) in (0u32..).zip(&self.entries) {
            let first = entry.first_handle as usize;
            let handles = &self.handles[first..first + usize::from(entry.handle_count)];
            let section =
                attributes.next_if(|(at, _)| *at == position).map_or(&[][..], |(_, section)| section);
            if list.push(*entry, handles, section).is_err() {
                let retry = ObjectEntry::failed(ErrorCode::Retry, 0);
                list.push(retry, &[], &[]).expect("an entry without handles always fits");
            }
        }
        list.finish()
    }
}

fn object_flags(object: &ObjectView<'_>) -> ObjectFlags {
    let mut flags = ObjectFlags::NONE;
    if object.fewer_replicas {
        flags = flags.with(ObjectFlags::UNDER_REPLICATED);
    }
    if object.digestless {
        flags = flags.with(ObjectFlags::DIGESTLESS);
    }
    flags
}

/// Converts a location to a handle, without a capability.
pub(crate) fn handle(location: &StripeLocation, term: Term, digestless: bool) -> Handle {
    let mut flags = HandleFlags::NONE;
    if digestless {
        flags = flags.with(HandleFlags::DIGESTLESS);
    }
    if location.verify {
        flags = flags.with(HandleFlags::VERIFY);
    }
    // A record on disk is identified by its version; only its node knows the location.
    let on_disk = location.medium == Medium::Disk;
    let no_slot = (SegmentId(0), SlotId(0), Generation(0));
    let (segment, slot, generation) =
        if on_disk { no_slot } else { (location.segment, location.slot, location.generation) };
    Handle {
        node: location.node,
        segment,
        slot,
        generation,
        extent: location.extent,
        payload_offset: location.payload_offset(),
        stripe_offset: location.stripe.offset,
        stripe_len: location.stripe.len,
        stripe_root: location.root,
        capability: Capability::default(),
        term,
        stripe_index: location.stripe.index,
        stripe_count: location.stripe.count,
        replica: location.replica,
        medium: location.medium,
        flags,
    }
}

/// Encodes the attributes that readers and writers need: without the user data, which is only in the record.
fn attribute_section(object: &ObjectView<'_>) -> Vec<u8> {
    let attributes = Attributes {
        pin: object.pin,
        expires: object.expires,
        cohort: object.cohort.map(Into::into),
        parent: object.parent.and_then(ParentHash::new),
        ..Attributes::default()
    };
    let mut section = vec![];
    attributes.encode(&mut section);
    section
}
