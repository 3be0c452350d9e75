//! What clients do, and what they must be told.

use std::collections::BTreeSet;
use std::time::Duration;

use moontide_meta::{
    Ask, Medium, PlaceView, PutEnd, PutOptions, PutStart, Removal, ReportState, TenantIx, Waiter,
};
use moontide_types::bounds::LEASE_MS_MAX;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ErrorCode, Key, SegmentId};

use crate::command::Put;
use crate::node::RecordModel;
use crate::world::{
    Check, KEYS, Lease, MayEnd, PutModel, World, ensure, id_of, is_one_sided, key_of, tenant_of,
};

impl World {
    pub(crate) fn put_start(&mut self, put: &Put) -> Result<Option<usize>, String> {
        self.may_end = MayEnd::Any;
        let key = put.key % KEYS;
        let bytes = key_of(key);
        let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let tenant = tenant_of(key);
        let before = self.group.query(self.now, &ask);
        let used_before = crate::check::usage(self, tenant)?;
        let node = |number: Option<u8>| number.map(|number| self.nodes[usize::from(number)].id);
        let options = PutOptions {
            replicas: put.replicas,
            replicas_min: put.replicas_min,
            stripes: put.stripes,
            local_node: node(put.local),
            preferred_nodes: node(put.preferred).into_iter().collect(),
            preferred_segments: node(put.preferred).into_iter().map(|node| (node, SegmentId(0))).collect(),
            upsert: put.upsert,
            one_sided: put.one_sided,
            ttl_ms: put.ttl_ms,
            ..PutOptions::default()
        };
        let pin = PinClass::from_number(put.pin).unwrap();
        let cohort = put.cohort.map(|cohort| vec![b'c', cohort]);
        let parent = put.parent.then(|| vec![7; 32]);
        let start = PutStart {
            ask,
            tenant: TenantIx(tenant.into()),
            caller: put.caller.into(),
            object_len: put.len,
            attributes_len: 16,
            pin,
            expires: None,
            cohort: cohort.as_deref(),
            parent: parent.as_deref(),
            options: &options,
        };
        let (epoch, places, replicas, window, expires) =
            match self.group.put_start(self.now, &start, &mut self.effects) {
                Ok(given) => {
                    let object = given.object;
                    (object.epoch, object.places.to_vec(), object.replicas, given.window, object.expires)
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
            ensure!(detail.writing || put.upsert, "a put without upsert replaced {detail:?}");
            if !detail.writing {
                self.replaced.insert(key, detail.epoch);
            }
        }
        let newest = self.epochs.last().copied().unwrap_or(Epoch::ZERO);
        ensure!(epoch > newest, "epoch {epoch} after {newest}");
        self.epochs.insert(epoch);
        ensure!(replicas >= put.replicas_min && replicas <= put.replicas, "{replicas} replicas");
        let stripes = places.len() / usize::from(replicas);
        for (at, place) in places.iter().enumerate() {
            let others = places.iter().enumerate().filter(|(other, _)| other / stripes != at / stripes);
            ensure!(
                others.into_iter().all(|(_, other)| other.node != place.node),
                "two replicas on {}",
                place.node
            );
            crate::check::may_be_given(self, place)?;
        }
        let mounts = places.iter().map(|place| {
            let (node, at) = self.position(place.node, place.segment);
            self.nodes[node].segments[at].mount.as_ref().map_or(0, |mount| mount.number)
        });
        let mounts = mounts.collect();
        self.puts.push(PutModel {
            key,
            epoch,
            object_len: put.len,
            stripes,
            committed: vec![false; places.len()],
            places,
            mounts,
            deadline: self.now.mono.after(window),
            expires,
            pin,
            pin_stored: pin,
            one_sided: put.one_sided,
            cohort,
            parent,
            acked: false,
            seen: false,
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
        for place in 0..self.puts[put].places.len() {
            self.begin(put, place);
            self.commit(put, place);
        }
    }

    /// A writer keeps to its deadline; a node refuses what was given by an older master or in an earlier mount.
    pub(crate) fn begin(&mut self, put: usize, at: usize) {
        let put = &self.puts[put];
        let place = put.places[at];
        let (node, segment) = self.position(place.node, place.segment);
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
            stripe: place.stripe,
            root: put.stripe_roots()[at % put.stripes],
            extent: place.extent,
            one_sided: put.one_sided,
            pin: put.pin_stored,
            expires: put.expires,
            cohort: put.cohort.clone(),
            parent: put.parent.clone(),
        };
        // A refusal is no failure of the group's: the reservation may be over.
        let _begun = segment.begin(&place, put.epoch, record);
    }

    pub(crate) fn commit(&mut self, put: usize, at: usize) {
        let (place, epoch) = (self.puts[put].places[at], self.puts[put].epoch);
        let (node, segment) = self.position(place.node, place.segment);
        let node = &mut self.nodes[node];
        if node.segments[segment].generation == place.generation
            && node.segments[segment].commit(place.slot.0, epoch, &mut node.answers)
        {
            self.puts[put].committed[at] = true;
        }
    }

    pub(crate) fn writer_dies(&mut self, put: usize) {
        for at in 0..self.puts[put].places.len() {
            let (place, epoch) = (self.puts[put].places[at], self.puts[put].epoch);
            let (node, segment) = self.position(place.node, place.segment);
            let node = &mut self.nodes[node];
            if node.segments[segment].generation == place.generation {
                node.segments[segment].abort(place.slot.0, epoch, &mut node.answers);
            }
        }
    }

    pub(crate) fn put_end(&mut self, at: usize, failed: u8) -> Check {
        let put = self.puts[at].clone();
        self.may_end = MayEnd::Keys(1 << put.key);
        let replicas = put.places.len() / put.stripes;
        let written = |replica: usize| {
            failed >> replica & 1 == 0 && (0..put.stripes).all(|s| put.committed[replica * put.stripes + s])
        };
        let outcomes: Vec<Option<ErrorCode>> =
            (0..replicas).map(|replica| (!written(replica)).then_some(ErrorCode::DeadlineExceeded)).collect();
        let stripe_roots = if put.stripes > 1 { put.stripe_roots() } else { vec![] };
        let bytes = key_of(put.key);
        let ask = Ask { id: id_of(put.key), key: Key::new(&bytes).unwrap() };
        let before = self.group.query(self.now, &ask);
        let current = before.as_ref().is_some_and(|detail| detail.epoch == put.epoch);
        let writing = current && before.as_ref().is_some_and(|detail| detail.writing);
        let good = writing
            && (0..replicas).filter(|&replica| written(replica)).any(|replica| {
                let mut places = replica * put.stripes..(replica + 1) * put.stripes;
                places.all(|place| self.is_held(&put, place))
            });
        let end = PutEnd {
            id: id_of(put.key),
            epoch: put.epoch,
            root: put.root(),
            outcomes: &outcomes,
            stripe_roots: &stripe_roots,
        };
        let answer = self.group.put_end(self.now, &end, &mut self.effects);
        match answer {
            Ok(()) => {
                // A complete one whose time is over, or whose nodes went away, is gone for readers; its put was a good one.
                // So is one that a report completed, and whose time was over before any reader asked.
                let expired = put.expires.is_some_and(|at| at <= self.now.unix);
                let stored = (0..replicas).any(&written);
                let was_complete = put.acked || put.seen || expired && stored;
                ensure!(current || was_complete, "the end of {} was acknowledged: {before:?}", put.epoch);
                ensure!(!put.removed, "the end of {} was acknowledged after its removal", put.epoch);
                if !put.acked {
                    self.check_replaced(put.key, put.epoch)?;
                }
                self.puts[at].acked = true;
                if writing {
                    self.watcher.completed(put.key);
                    for replica in (0..replicas).filter(|&replica| written(replica)) {
                        for place in replica * put.stripes..(replica + 1) * put.stripes {
                            self.note_ready(&put, place);
                        }
                    }
                }
            }
            Err(ErrorCode::Retry) => {}
            Err(code) => {
                ensure!(!good, "the end of {} was refused with {code:?}: {before:?}", put.epoch);
                ensure!(!current || writing, "the repeated end of {} was refused with {code:?}", put.epoch);
            }
        }
        Ok(())
    }

    /// Whether a place is where it was reserved, and the master has not taken it back.
    pub(crate) fn is_held(&self, put: &PutModel, at: usize) -> bool {
        let place = put.places[at];
        let (node, segment) = self.position(place.node, place.segment);
        self.nodes[node].segments[segment].mount.as_ref().is_some_and(|mount| {
            mount.number == put.mounts[at] && !mount.ordered.contains(&(place.slot.0, put.epoch))
        })
    }

    pub(crate) fn note_ready(&mut self, put: &PutModel, at: usize) {
        if !self.is_held(put, at) {
            return;
        }
        let place = put.places[at];
        let (node, segment) = self.position(place.node, place.segment);
        if let Some(mount) = &mut self.nodes[node].segments[segment].mount {
            mount.known_ready.insert(place.slot.0, put.epoch);
        }
    }

    /// A put that replaced a complete version is acknowledged: no node within reach may have the old one.
    pub(crate) fn check_replaced(&mut self, key: u8, by: Epoch) -> Check {
        let Some(old) = self.replaced.remove(&key) else { return Ok(()) };
        for segment in self.nodes.iter().flat_map(|node| &node.segments) {
            let within_reach = segment.mount.as_ref().is_some_and(|mount| mount.ended);
            for word in segment.words.iter().filter(|_| within_reach) {
                let is_old = word.epoch == old && word.state == ReportState::Ready;
                ensure!(!is_old, "{by} was acknowledged while {old} can still be read");
            }
        }
        for disk in self.nodes.iter().filter_map(|node| node.disk.as_ref()) {
            let within_reach = disk.mount.as_ref().is_some_and(|mount| mount.recovered);
            ensure!(!within_reach || !disk.may_have(old), "{by} was acknowledged while {old} is on disk");
        }
        Ok(())
    }

    pub(crate) fn put_revoke(&mut self, at: usize) -> Check {
        let (key, epoch) = (self.puts[at].key, self.puts[at].epoch);
        self.may_end = MayEnd::Keys(1 << key);
        let bytes = key_of(key);
        let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let before = self.group.query(self.now, &ask);
        let writing = before.as_ref().is_some_and(|detail| detail.epoch == epoch && detail.writing);
        let revoked = self.group.put_revoke(self.now, id_of(key), epoch, &mut self.effects);
        ensure!(
            revoked.is_ok() == writing,
            "the revocation of {epoch} was answered with {revoked:?}: {before:?}"
        );
        Ok(())
    }

    pub(crate) fn lookup(&mut self, key: u8, lease_ms: u32) -> Check {
        let bytes = key_of(key);
        let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let before = self.group.query(self.now, &ask);
        let mut found = None;
        self.group.lookup(self.now, lease_ms, &[ask], |_, answer| {
            found = Some(
                answer.map(|object| (object.epoch, object.object_len, object.root, object.places.to_vec())),
            );
        });
        match found.expect("every key is answered") {
            Ok((epoch, len, root, places)) => {
                crate::check::may_be_read(self, key, epoch, len, root, &places)?;
                let put = self.put_of(key, epoch).expect("may_be_read found it");
                let replicas: BTreeSet<u8> = places.iter().map(|place| place.replica).collect();
                ensure!(places.len() == replicas.len() * self.puts[put].stripes, "half a replica of {epoch}");
                self.lease(epoch, &places, lease_ms);
            }
            Err(ErrorCode::NotReady) => ensure!(before.is_some_and(|detail| detail.writing), "NotReady"),
            Err(ErrorCode::NotFound) => ensure!(before.is_none(), "NotFound, but {before:?}"),
            Err(code) => return Err(format!("a lookup was answered with {code:?}")),
        }
        Ok(())
    }

    pub(crate) fn lease(&mut self, epoch: Epoch, places: &[PlaceView], lease_ms: u32) {
        let until = self.now.mono.after(Duration::from_millis(lease_ms.min(LEASE_MS_MAX).into()));
        let now = self.now.mono;
        self.leases.retain(|lease| lease.until > now);
        // Where the node is asked first, a lease is a hint: it refuses what is not there any more.
        let promised = |place: &&PlaceView| place.medium != Medium::Disk && is_one_sided(place.node);
        for place in places.iter().filter(promised).filter(|_| lease_ms > 0) {
            let (node, at) = self.position(place.node, place.segment);
            let mount = self.nodes[node].segments[at].mount.as_ref().map_or(0, |mount| mount.number);
            self.leases.push(Lease {
                node: place.node,
                segment: place.segment,
                generation: place.generation,
                mount,
                slot: place.slot,
                extent: place.extent,
                epoch,
                until,
            });
        }
    }

    pub(crate) fn exist(&mut self, key: u8) -> Check {
        let bytes = key_of(key);
        let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let there = self.group.query(self.now, &ask).is_some_and(|detail| !detail.writing);
        let mut answer = None;
        self.group.exist(self.now, &[ask], |_, exists| answer = Some(exists));
        ensure!(answer == Some(there), "exist says {answer:?}, query {there}");
        Ok(())
    }

    pub(crate) fn touch(&mut self, key: u8, lease_ms: u32) -> Check {
        let bytes = key_of(key);
        let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
        if self.group.touch(self.now, lease_ms, &ask).is_ok() {
            let detail = self.group.query(self.now, &ask).ok_or("touched, but not there")?;
            self.lease(detail.epoch, &detail.places, lease_ms);
        }
        Ok(())
    }

    pub(crate) fn set_pin(&mut self, key: u8, pin: u8) -> Check {
        let bytes = key_of(key);
        let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let pin = PinClass::from_number(pin).unwrap();
        if self.group.set_pin(self.now, &ask, pin).is_ok() {
            let detail = self.group.query(self.now, &ask).ok_or("pinned, but not there")?;
            let put = self.put_of(key, detail.epoch).ok_or("pinned a stranger")?;
            self.puts[put].pin = pin;
        }
        Ok(())
    }

    pub(crate) fn remove(&mut self, key: u8, force: bool) -> Check {
        self.may_end = MayEnd::Keys(1 << key);
        let bytes = key_of(key);
        let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let before = self.group.query(self.now, &ask);
        let meant = self.meant_by_removal(key);
        // A put that comes after the removal is not one that replaces.
        self.replaced.remove(&key);
        let waiter = self.waiter();
        let removal = self.group.remove(self.now, &ask, force, Waiter(waiter), &mut self.effects);
        let after = self.group.query(self.now, &ask);
        match removal {
            Removal::Waiting => {
                self.removals.insert(waiter, (key, meant));
                ensure!(after.is_none(), "being removed, but {after:?}");
            }
            Removal::Done(None) => {
                ensure!(before.is_some(), "removed what was not there");
                ensure!(after.is_none(), "removed, but {after:?}");
                self.removed(key, &meant)?;
            }
            Removal::Done(Some(ErrorCode::Pending)) => {
                ensure!(after.is_none(), "pending, but {after:?}");
                self.removal_pending(&meant);
            }
            Removal::Done(Some(ErrorCode::NotFound)) => {
                // It was there once, and its caller relies on its being gone as much as with a removal.
                ensure!(before.is_none(), "not found, but {before:?}");
                self.removed(key, &meant)?;
            }
            Removal::Done(Some(ErrorCode::InProgress)) => {
                ensure!(!force && before.is_some_and(|detail| detail.writing), "in progress");
            }
            Removal::Done(Some(ErrorCode::Leased)) => {
                let held = before.is_some_and(|detail| detail.leased_ms > 0 || detail.pin == PinClass::Hard);
                ensure!(!force && held, "leased, but nobody holds it");
            }
            Removal::Done(Some(code)) => return Err(format!("a removal was answered with {code:?}")),
        }
        Ok(())
    }

    pub(crate) fn waiter(&mut self) -> u64 {
        self.mounts += 1;
        self.mounts
    }

    /// The versions that a removal is about: those that were complete.
    pub(crate) fn meant_by_removal(&self, key: u8) -> BTreeSet<Epoch> {
        self.puts
            .iter()
            .filter(|put| put.key == key && (put.acked || put.seen))
            .map(|put| put.epoch)
            .collect()
    }

    /// A removal was answered with `Pending`: this master remembers it.
    pub(crate) fn removal_pending(&mut self, meant: &BTreeSet<Epoch>) {
        for put in self.puts.iter_mut().filter(|put| meant.contains(&put.epoch)) {
            put.removal_pending = true;
        }
    }

    /// A removal was acknowledged: nothing of what it was about may be READY anywhere.
    pub(crate) fn removed(&mut self, key: u8, meant: &BTreeSet<Epoch>) -> Check {
        for node in &self.nodes {
            for segment in &node.segments {
                if segment.mount.is_none() && self.now.mono > segment.wiped_after {
                    continue;
                }
                for word in &segment.words {
                    ensure!(
                        word.state != ReportState::Ready || !meant.contains(&word.epoch),
                        "the removal of key {key} is acknowledged, but {} is READY in segment {} of node {}",
                        word.epoch,
                        segment.id,
                        node.id
                    );
                }
            }
        }
        for node in &self.nodes {
            // A disk that nobody waits for any more is taken as empty when it comes.
            let Some(disk) = node.disk.as_ref().filter(|disk| disk.mount.is_some()) else { continue };
            let left = meant.iter().find(|&&epoch| disk.may_have(epoch));
            ensure!(
                left.is_none(),
                "the removal of key {key} is acknowledged, but {left:?} is or will be on the disk of node {}",
                node.id
            );
        }
        for put in self.puts.iter_mut().filter(|put| meant.contains(&put.epoch)) {
            put.removed = true;
        }
        Ok(())
    }
}
