//! Actions of clients, and checks of the responses.

use std::collections::BTreeSet;
use std::time::Duration;

use moontide_meta::{
    JobId, JobState, LookupKey, PutEnd, PutOptions, PutStart, RemoveOutcome, ReportState, StripeLocation,
    TenantIndex, WaiterId,
};
use moontide_types::limits::LEASE_MS_MAX;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ErrorCode, Key, Medium, Place, SegmentId, Spread};

use crate::command::Put;
use crate::harness::{
    Check, KEYS, Lease, MayEnd, ModelHarness, PutModel, ensure, id_of, is_one_sided, key_of, rack_of,
    tenant_of,
};
use crate::node::RecordModel;

impl ModelHarness {
    pub(crate) fn put_start(&mut self, put: &Put) -> Result<Option<usize>, String> {
        self.may_end = MayEnd::Any;
        let key = put.key % KEYS;
        let bytes = key_of(key);
        let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let tenant = tenant_of(key);
        let before = self.group.query(self.now, &lookup);
        let used_before = crate::check::usage(self, tenant)?;
        let node = |number: Option<u8>| number.map(|number| self.nodes[usize::from(number)].id);
        // The first segment of the node, then any other one.
        let preferred = node(put.preferred)
            .map_or(vec![], |node| vec![Place { node, segment: Some(SegmentId(0)) }, Place::from(node)]);
        let options = PutOptions {
            replicas: put.replicas,
            replicas_min: put.replicas_min,
            stripes: put.stripes,
            local_node: node(put.local),
            preferred,
            upsert: put.upsert,
            one_sided: put.one_sided,
            ttl_ms: put.ttl_ms,
            ..PutOptions::default()
        };
        let pin = PinClass::from_number(put.pin).unwrap();
        let spread = Spread::from_number(put.spread);
        let cohort = put.cohort.map(|cohort| vec![b'c', cohort]);
        let parent = put.parent.then(|| vec![7; 32]);
        let start = PutStart {
            object: lookup,
            tenant: TenantIndex(tenant.into()),
            caller: put.caller.into(),
            object_len: put.len,
            attributes_len: 16,
            pin,
            spread,
            disk_replicas: put.disk_replicas,
            expires: None,
            cohort: cohort.as_deref(),
            parent: parent.as_deref(),
            options: &options,
        };
        let (epoch, locations, replicas, window, expires) =
            match self.group.put_start(self.now, &start, &mut self.effects) {
                Ok(reservation) => {
                    let object = reservation.object;
                    (
                        object.epoch,
                        object.locations.to_vec(),
                        object.replicas,
                        reservation.window,
                        object.expires,
                    )
                }
                Err(code) => {
                    let complete = before.as_ref().is_some_and(|detail| !detail.writing);
                    let writing = before.as_ref().is_some_and(|detail| detail.writing);
                    ensure!(
                        code != ErrorCode::AlreadyExists || complete && !put.upsert,
                        "AlreadyExists for {before:?}"
                    );
                    ensure!(code != ErrorCode::InProgress || writing, "InProgress for {before:?}");
                    return Ok(None);
                }
            };
        if let Some(detail) = &before {
            ensure!(detail.writing || put.upsert, "put without upsert replaced {detail:?}");
            if !detail.writing {
                self.replaced.insert(key, detail.epoch);
            }
        }
        let newest = self.epochs.last().copied().unwrap_or(Epoch::ZERO);
        ensure!(epoch > newest, "epoch {epoch} after {newest}");
        self.epochs.insert(epoch);
        ensure!(replicas >= put.replicas_min && replicas <= put.replicas, "{replicas} replicas");
        let stripes = locations.len() / usize::from(replicas);
        for (at, location) in locations.iter().enumerate() {
            let others = locations.iter().enumerate().filter(|(other, _)| other / stripes != at / stripes);
            ensure!(
                others.clone().all(|(_, other)| other.node != location.node),
                "two replicas on node {}",
                location.node
            );
            ensure!(
                spread.is_none()
                    || others.into_iter().all(|(_, other)| rack_of(other.node) != rack_of(location.node)),
                "two replicas in the rack of node {}",
                location.node
            );
            crate::check::may_be_granted(self, location)?;
        }
        let mounts = locations.iter().map(|location| {
            let (node, at) = self.position(location.node, location.segment);
            self.nodes[node].segments[at].mount.as_ref().map_or(0, |mount| mount.number)
        });
        let mounts = mounts.collect();
        self.puts.push(PutModel {
            key,
            epoch,
            object_len: put.len,
            stripes,
            committed: vec![false; locations.len()],
            locations,
            mounts,
            deadline: self.now.mono.after(window),
            expires,
            pin,
            pin_stored: pin,
            one_sided: put.one_sided,
            cohort,
            parent,
            extra_replicas: put.replicas - 1,
            spread,
            disk_replicas: put.disk_replicas,
            acked: false,
            seen: false,
            upsert: put.upsert,
            removed: false,
            removal_pending: false,
        });
        let (bytes, objects) = crate::check::usage(self, tenant)?;
        let quota = self.quotas[usize::from(tenant)];
        let within = |used: u64, before: u64, max: u64| max == 0 || used <= max || used <= before;
        ensure!(within(bytes, used_before.0, quota.bytes_max), "{bytes} bytes with a quota of {quota:?}");
        ensure!(
            within(objects, used_before.1, quota.objects_max),
            "{objects} objects with a quota of {quota:?}"
        );
        Ok(Some(self.puts.len() - 1))
    }

    pub(crate) fn write_all(&mut self, put: usize) {
        for location in 0..self.puts[put].locations.len() {
            self.begin(put, location);
            self.commit(put, location);
        }
    }

    /// A writer respects its deadline; a node rejects locations granted by an older master or in an earlier mount.
    pub(crate) fn begin(&mut self, put: usize, at: usize) {
        let put = &self.puts[put];
        let location = put.locations[at];
        let (node, segment) = self.position(location.node, location.segment);
        let segment = &mut self.nodes[node].segments[segment];
        if self.now.mono >= put.deadline
            || put.epoch.term() < segment.term
            || put.mounts[at] != segment.mounted_as
        {
            return;
        }
        let record = RecordModel {
            id: id_of(put.key),
            key: key_of(put.key),
            tenant: tenant_of(put.key),
            object_len: put.object_len,
            stripe: location.stripe,
            root: put.stripe_roots()[at % put.stripes],
            extent: location.extent,
            one_sided: put.one_sided,
            pin: put.pin_stored,
            expires: put.expires,
            cohort: put.cohort.clone(),
            parent: put.parent.clone(),
            extra_replicas: put.extra_replicas,
            spread: put.spread,
            disk_replicas: put.disk_replicas,
        };
        // A refusal is not an error of the group: the reservation may be over.
        let _begun = segment.begin(&location, put.epoch, record);
    }

    pub(crate) fn commit(&mut self, put: usize, at: usize) {
        let (location, epoch) = (self.puts[put].locations[at], self.puts[put].epoch);
        let (node, segment) = self.position(location.node, location.segment);
        let node = &mut self.nodes[node];
        if node.segments[segment].generation == location.generation
            && node.segments[segment].commit(location.slot.0, epoch, &mut node.responses)
        {
            self.puts[put].committed[at] = true;
        }
    }

    pub(crate) fn writer_dies(&mut self, put: usize) {
        for at in 0..self.puts[put].locations.len() {
            let (location, epoch) = (self.puts[put].locations[at], self.puts[put].epoch);
            let (node, segment) = self.position(location.node, location.segment);
            let node = &mut self.nodes[node];
            if node.segments[segment].generation == location.generation {
                node.segments[segment].abort(location.slot.0, epoch, &mut node.responses);
            }
        }
    }

    pub(crate) fn put_end(&mut self, at: usize, failed: u8) -> Check {
        let put = self.puts[at].clone();
        self.may_end = MayEnd::Keys(1 << put.key);
        let replicas = put.locations.len() / put.stripes;
        let written = |replica: usize| {
            failed >> replica & 1 == 0 && (0..put.stripes).all(|s| put.committed[replica * put.stripes + s])
        };
        let outcomes: Vec<Option<ErrorCode>> =
            (0..replicas).map(|replica| (!written(replica)).then_some(ErrorCode::DeadlineExceeded)).collect();
        let stripe_roots = if put.stripes > 1 { put.stripe_roots() } else { vec![] };
        let bytes = key_of(put.key);
        let lookup = LookupKey { id: id_of(put.key), key: Key::new(&bytes).unwrap() };
        let before = self.group.query(self.now, &lookup);
        let current = before.as_ref().is_some_and(|detail| detail.epoch == put.epoch);
        let writing = current && before.as_ref().is_some_and(|detail| detail.writing);
        let must_succeed = writing
            && (0..replicas).filter(|&replica| written(replica)).any(|replica| {
                let mut locations = replica * put.stripes..(replica + 1) * put.stripes;
                locations.all(|location| self.is_held(&put, location))
            });
        let end = PutEnd {
            id: id_of(put.key),
            epoch: put.epoch,
            root: put.root(),
            outcomes: &outcomes,
            stripe_roots: &stripe_roots,
            replaces: put.upsert,
        };
        let response = self.group.put_end(self.now, &end, &mut self.effects);
        match response {
            Ok(()) | Err(ErrorCode::Pending) => {
                ensure!(response.is_ok() || put.upsert, "Pending for a put that replaces nothing");
                // For readers a complete object is gone when it has expired or its nodes are lost; its put was still
                // successful. The same holds for an object that a report completed, and that expired or was lost before
                // any lookup.
                let expired = put.expires.is_some_and(|at| at <= self.now.unix);
                let stored = (0..replicas).any(&written);
                let is_lost = (0..replicas).all(|replica| {
                    let mut locations = replica * put.stripes..(replica + 1) * put.stripes;
                    locations.any(|location| !self.is_held(&put, location))
                });
                let was_complete = put.acked || put.seen || stored && (expired || is_lost);
                ensure!(current || was_complete, "PutEnd of {} acknowledged: {before:?}", put.epoch);
                ensure!(!put.removed, "PutEnd of {} acknowledged after its removal", put.epoch);
                if !put.acked {
                    self.check_replaced(put.key, put.epoch)?;
                }
                if put.upsert {
                    // An acknowledged replacement is a removal of all older versions.
                    let mut replaced = self.epochs_of_removal(put.key);
                    replaced.retain(|epoch| *epoch < put.epoch);
                    match response {
                        Ok(()) => self.removed(put.key, &replaced)?,
                        Err(_) => self.removal_pending(&replaced),
                    }
                }
                self.puts[at].acked = true;
                if writing {
                    self.watcher.completed(put.key);
                    for replica in (0..replicas).filter(|&replica| written(replica)) {
                        for location in replica * put.stripes..(replica + 1) * put.stripes {
                            self.note_ready(&put, location);
                        }
                    }
                }
            }
            Err(ErrorCode::Retry) => {}
            Err(code) => {
                ensure!(!must_succeed, "PutEnd of {} refused with {code:?}: {before:?}", put.epoch);
                ensure!(!current || writing, "repeated PutEnd of {} refused with {code:?}", put.epoch);
            }
        }
        Ok(())
    }

    /// Whether a location is still mounted as it was reserved, and the master has not released it.
    pub(crate) fn is_held(&self, put: &PutModel, at: usize) -> bool {
        let location = put.locations[at];
        let (node, segment) = self.position(location.node, location.segment);
        self.nodes[node].segments[segment].mount.as_ref().is_some_and(|mount| {
            mount.number == put.mounts[at] && !mount.commanded.contains(&(location.slot.0, put.epoch))
        })
    }

    pub(crate) fn note_ready(&mut self, put: &PutModel, at: usize) {
        if !self.is_held(put, at) {
            return;
        }
        let location = put.locations[at];
        let (node, segment) = self.position(location.node, location.segment);
        if let Some(mount) = &mut self.nodes[node].segments[segment].mount {
            mount.known_ready.insert(location.slot.0, put.epoch);
        }
    }

    /// Checks an acknowledged put that replaced a complete version: no reachable node may have the old one.
    pub(crate) fn check_replaced(&mut self, key: u8, by: Epoch) -> Check {
        let Some(old) = self.replaced.remove(&key) else { return Ok(()) };
        for segment in self.nodes.iter().flat_map(|node| &node.segments) {
            let reachable = segment.mount.as_ref().is_some_and(|mount| mount.ended);
            for word in segment.words.iter().filter(|_| reachable) {
                let is_old = word.epoch == old && word.state == ReportState::Ready;
                ensure!(!is_old, "{by} acknowledged while {old} is READY");
            }
        }
        for disk in self.nodes.iter().filter_map(|node| node.disk.as_ref()) {
            let reachable = disk.mount.as_ref().is_some_and(|mount| mount.recovered);
            ensure!(!reachable || !disk.may_have(old), "{by} acknowledged while {old} is on disk");
        }
        Ok(())
    }

    pub(crate) fn put_revoke(&mut self, at: usize) -> Check {
        let (key, epoch) = (self.puts[at].key, self.puts[at].epoch);
        self.may_end = MayEnd::Keys(1 << key);
        let bytes = key_of(key);
        let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let before = self.group.query(self.now, &lookup);
        let writing = before.as_ref().is_some_and(|detail| detail.epoch == epoch && detail.writing);
        let revoked = self.group.put_revoke(self.now, id_of(key), epoch, &mut self.effects);
        ensure!(revoked.is_ok() == writing, "response to the revocation of {epoch}: {revoked:?}: {before:?}");
        Ok(())
    }

    pub(crate) fn lookup(&mut self, key: u8, lease_ms: u32) -> Check {
        let bytes = key_of(key);
        let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let before = self.group.query(self.now, &lookup);
        let mut found = None;
        self.group.lookup(self.now, lease_ms, &[lookup], |_, response| {
            found = Some(
                response
                    .map(|object| (object.epoch, object.object_len, object.root, object.locations.to_vec())),
            );
        });
        match found.expect("lookup responds for every key") {
            Ok((epoch, len, root, locations)) => {
                crate::check::may_be_read(self, key, epoch, len, root, &locations)?;
                let put = self.put_of(key, epoch).expect("may_be_read found it");
                let replicas: BTreeSet<u8> = locations.iter().map(|location| location.replica).collect();
                ensure!(
                    locations.len() == replicas.len() * self.puts[put].stripes,
                    "incomplete replica of {epoch}"
                );
                self.lease(epoch, &locations, lease_ms);
            }
            Err(ErrorCode::NotReady) => {
                ensure!(before.is_some_and(|detail| detail.writing), "NotReady, but not being written")
            }
            Err(ErrorCode::NotFound) => ensure!(before.is_none(), "NotFound, but {before:?}"),
            Err(code) => return Err(format!("unexpected response to a lookup: {code:?}")),
        }
        Ok(())
    }

    pub(crate) fn lease(&mut self, epoch: Epoch, locations: &[StripeLocation], lease_ms: u32) {
        let until = self.now.mono.after(Duration::from_millis(lease_ms.min(LEASE_MS_MAX).into()));
        let now = self.now.mono;
        self.leases.retain(|lease| lease.until > now);
        // If readers access a segment through its node, a lease is a hint: the node rejects reads of missing records.
        let is_leased =
            |location: &&StripeLocation| location.medium != Medium::Disk && is_one_sided(location.node);
        for location in locations.iter().filter(is_leased).filter(|_| lease_ms > 0) {
            let (node, at) = self.position(location.node, location.segment);
            let mount = self.nodes[node].segments[at].mount.as_ref().map_or(0, |mount| mount.number);
            self.leases.push(Lease {
                node: location.node,
                segment: location.segment,
                generation: location.generation,
                mount,
                slot: location.slot,
                extent: location.extent,
                epoch,
                until,
            });
        }
    }

    pub(crate) fn exist(&mut self, key: u8) -> Check {
        let bytes = key_of(key);
        let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let exists = self.group.query(self.now, &lookup).is_some_and(|detail| !detail.writing);
        let mut response = None;
        self.group.exist(self.now, &[lookup], |_, found| response = Some(found));
        ensure!(response == Some(exists), "exist returns {response:?}, query {exists}");
        Ok(())
    }

    pub(crate) fn touch(&mut self, key: u8, lease_ms: u32) -> Check {
        let bytes = key_of(key);
        let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
        if self.group.touch(self.now, lease_ms, &lookup).is_ok() {
            let detail = self.group.query(self.now, &lookup).ok_or("touched object does not exist")?;
            self.lease(detail.epoch, &detail.locations, lease_ms);
        }
        Ok(())
    }

    pub(crate) fn set_pin(&mut self, key: u8, pin: u8) -> Check {
        let bytes = key_of(key);
        let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let pin = PinClass::from_number(pin).unwrap();
        if self.group.set_pin(self.now, &lookup, pin).is_ok() {
            let detail = self.group.query(self.now, &lookup).ok_or("pinned object does not exist")?;
            let put = self.put_of(key, detail.epoch).ok_or("pinned object has no put")?;
            self.puts[put].pin = pin;
        }
        Ok(())
    }

    pub(crate) fn remove(&mut self, key: u8, force: bool) -> Check {
        self.may_end = MayEnd::Keys(1 << key);
        let bytes = key_of(key);
        let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let before = self.group.query(self.now, &lookup);
        let epochs = self.epochs_of_removal(key);
        // A put after the removal does not count as a replacement.
        self.replaced.remove(&key);
        let waiter = self.waiter();
        let removal = self.group.remove(self.now, &lookup, force, WaiterId(waiter), &mut self.effects);
        let after = self.group.query(self.now, &lookup);
        match removal {
            RemoveOutcome::Waiting => {
                self.removals.insert(waiter, (key, epochs));
                ensure!(after.is_none(), "removal in progress, but {after:?}");
            }
            RemoveOutcome::Done(None) => {
                ensure!(before.is_some(), "removed an object that did not exist");
                ensure!(after.is_none(), "removed, but {after:?}");
                self.removed(key, &epochs)?;
            }
            RemoveOutcome::Done(Some(ErrorCode::Pending)) => {
                ensure!(after.is_none(), "pending, but {after:?}");
                self.removal_pending(&epochs);
            }
            RemoveOutcome::Done(Some(ErrorCode::NotFound)) => {
                // It existed before, and the caller relies on its absence as much as after a removal.
                ensure!(before.is_none(), "not found, but {before:?}");
                self.removed(key, &epochs)?;
            }
            RemoveOutcome::Done(Some(ErrorCode::InProgress)) => {
                ensure!(
                    !force && before.is_some_and(|detail| detail.writing),
                    "InProgress, but not being written"
                );
            }
            RemoveOutcome::Done(Some(ErrorCode::Leased)) => {
                let held = before.is_some_and(|detail| detail.leased_ms > 0 || detail.pin == PinClass::Hard);
                ensure!(!force && held, "Leased, but neither leased nor pinned");
            }
            RemoveOutcome::Done(Some(code)) => {
                return Err(format!("unexpected response to a removal: {code:?}"));
            }
        }
        Ok(())
    }

    pub(crate) fn waiter(&mut self) -> u64 {
        self.mounts += 1;
        self.mounts
    }

    /// Versions that a removal covers: those that were complete.
    pub(crate) fn epochs_of_removal(&self, key: u8) -> BTreeSet<Epoch> {
        self.puts
            .iter()
            .filter(|put| put.key == key && (put.acked || put.seen))
            .map(|put| put.epoch)
            .collect()
    }

    /// Records a `Pending` response to a removal: this master keeps a tombstone.
    pub(crate) fn removal_pending(&mut self, epochs: &BTreeSet<Epoch>) {
        for put in self.puts.iter_mut().filter(|put| epochs.contains(&put.epoch)) {
            put.removal_pending = true;
        }
    }

    /// Checks the jobs that are done: a forced one has removed all that existed at its start.
    pub(crate) fn check_jobs(&mut self) -> Check {
        let is_done = |job: &JobId| self.group.job(*job).is_none_or(|status| status.state == JobState::Done);
        let done: Vec<JobId> = self.jobs.keys().copied().filter(is_done).collect();
        for job in done {
            for (key, epochs) in self.jobs.remove(&job).unwrap_or_default() {
                self.removed(key, &epochs)?;
            }
        }
        Ok(())
    }

    /// Checks an acknowledged removal: none of the covered versions may be READY anywhere.
    pub(crate) fn removed(&mut self, key: u8, epochs: &BTreeSet<Epoch>) -> Check {
        for node in &self.nodes {
            for segment in &node.segments {
                if segment.mount.is_none() && self.now.mono > segment.wiped_after {
                    continue;
                }
                for word in &segment.words {
                    ensure!(
                        word.state != ReportState::Ready || !epochs.contains(&word.epoch),
                        "removal of key {key} acknowledged, but {} is READY in segment {} of node {}",
                        word.epoch,
                        segment.id,
                        node.id
                    );
                }
            }
        }
        for node in &self.nodes {
            // A disk that the master no longer waits for is treated as empty when it mounts.
            let Some(disk) = node.disk.as_ref().filter(|disk| disk.mount.is_some()) else { continue };
            let left = epochs.iter().find(|&&epoch| disk.may_have(epoch));
            ensure!(
                left.is_none(),
                "removal of key {key} acknowledged, but {left:?} is or will be on the disk of node {}",
                node.id
            );
        }
        for put in self.puts.iter_mut().filter(|put| epochs.contains(&put.epoch)) {
            put.removed = true;
        }
        Ok(())
    }
}
