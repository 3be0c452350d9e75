//! Actions of nodes and their effect on the master: sessions, mounts, reports, commands; and crashes of the master.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use moontide_meta::{
    Effect, Group, GroupConfig, LookupKey, MountSpec, ReportRecord, ReportState, StripeRange, TenantIndex,
};
use moontide_types::record::PinClass;
use moontide_types::{ErrorCode, Extent, Key, Medium, ObjectId, SessionId, SlotId, Tenant, Term};

use crate::harness::{Check, MayEnd, ModelHarness, TENANTS, config, ensure, is_one_sided, rack_of};
use crate::node::MountModel;

impl ModelHarness {
    pub(crate) fn respond(&mut self, at: usize, count: usize) -> Check {
        for _ in 0..count {
            let node = &mut self.nodes[at];
            let Some((command, outcome)) = node.responses.pop_front() else { return Ok(()) };
            if node.session.is_some() {
                let adds = self.copy_adds_location(at, &command, outcome);
                let node = &self.nodes[at];
                let name = (node.id, command.segment);
                self.group.command_outcome(
                    name,
                    command.kind,
                    command.slot,
                    command.epoch,
                    outcome,
                    &mut self.effects,
                );
                if adds {
                    self.copy_added_location(at, &command)?;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn report(&mut self, number: usize, count: usize) -> Check {
        let (node, at) = self.segment_at(number);
        let name = (self.nodes[node].id, self.nodes[node].segments[at].id);
        let segment = &mut self.nodes[node].segments[at];
        let Some(mount) = &mut segment.mount else { return Ok(()) };
        let count = count.min(mount.stream.len());
        let changes: Vec<_> = mount.stream.drain(..count).collect();
        let first = mount.sent;
        mount.sent += count as u64;
        let mut keys = 0u8;
        let records = changes.iter().map(|change| {
            let record = change.record.as_ref();
            keys |= record.map_or(0, |record| 1 << (record.id.0[0] - 1));
            ReportRecord {
                slot: SlotId(change.slot),
                state: change.state,
                epoch: change.epoch,
                id: record.map_or(ObjectId([0; 16]), |record| record.id),
                tenant: TenantIndex(record.map_or(0, |record| record.tenant.into())),
                key: record.map_or(&[], |record| &record.key),
                object_len: record.map_or(0, |record| record.object_len),
                stripe: record
                    .map_or(StripeRange { index: 0, count: 1, offset: 0, len: 0 }, |record| record.stripe),
                root: record.filter(|_| change.state == ReportState::Ready).map_or(0, |record| record.root),
                extent: record.map_or(Extent::default(), |record| record.extent),
                payload_offset: record.map_or(0, |record| record.extent.span().offset()),
                digestless: false,
                one_sided: record.is_some_and(|record| record.one_sided),
                touched: false,
                pin: record.map_or(PinClass::None, |record| record.pin),
                expires: record.and_then(|record| record.expires),
                cohort: record.and_then(|record| record.cohort.as_deref()),
                parent: record.and_then(|record| record.parent.as_deref()),
                extra_replicas: record.map_or(0, |record| record.extra_replicas),
                spread: record.and_then(|record| record.spread),
                disk_replicas: record.map_or(0, |record| record.disk_replicas),
            }
        });
        let records: Vec<_> = records.collect();
        let response = self.group.report(
            self.now,
            name,
            segment.generation,
            self.term,
            first,
            records,
            &mut self.effects,
        );
        ensure!(response.is_ok(), "report refused with {response:?}");
        // Of several versions the newest complete one wins, in any order of the reports.
        for change in changes.iter().filter(|change| change.state == ReportState::Ready) {
            let Some(record) = change.record.as_ref().filter(|record| record.stripe.count == 1) else {
                continue;
            };
            let lookup = LookupKey { id: record.id, key: Key::new(&record.key).unwrap() };
            let found = self.group.query(self.now, &lookup).filter(|found| !found.writing);
            let put = self.puts.iter().find(|put| put.epoch == change.epoch);
            let dropped = mount.commanded.contains(&(change.slot, change.epoch));
            let is_valid = put.is_some_and(|put| {
                !dropped
                    && !put.removed
                    && !put.removal_pending
                    && put.expires.is_none_or(|at| at > self.now.unix)
            });
            if let Some(found) = found.filter(|_| is_valid && put.is_some_and(|put| put.acked)) {
                ensure!(found.epoch >= change.epoch, "found {}, expected {}", found.epoch, change.epoch);
            }
        }
        self.may_end = match self.may_end {
            MayEnd::Keys(others) => MayEnd::Keys(others | keys),
            _ => MayEnd::Keys(keys),
        };
        for change in changes {
            if change.state == ReportState::Ready {
                mount.known_ready.insert(change.slot, change.epoch);
            } else {
                mount.known_ready.remove(&change.slot);
            }
        }
        Ok(())
    }

    pub(crate) fn report_end(&mut self, number: usize) -> Check {
        let (node, at) = self.segment_at(number);
        let name = (self.nodes[node].id, self.nodes[node].segments[at].id);
        let segment = &mut self.nodes[node].segments[at];
        let Some(mount) = &mut segment.mount else { return Ok(()) };
        let response = self.group.report_end(
            self.now,
            name,
            segment.generation,
            self.term,
            mount.snapshot,
            &mut self.effects,
        );
        if mount.sent < mount.snapshot && !mount.ended {
            ensure!(response == Err(ErrorCode::Retry), "response to an early report end: {response:?}");
        } else {
            ensure!(response.is_ok(), "report end refused with {response:?}");
            mount.ended = true;
        }
        Ok(())
    }

    /// Delivers all messages in flight, until none is left. The watcher polls between them: an object can leave with
    /// one message and come back with the next.
    pub(crate) fn settle(&mut self) -> Check {
        for _ in 0..4 {
            for node in 0..self.nodes.len() {
                while self.nodes[node].execute_next(false) {}
                while self.nodes[node].write_next() || self.nodes[node].promote_next() {}
                while self.copy_next(node)? {}
                for _ in 0..32 {
                    self.send_disk_notice(node, true)?;
                    self.send_disk_notice(node, false)?;
                }
                self.respond(node, usize::MAX)?;
                self.watch()?;
            }
            for segment in 0..self.nodes.iter().map(|node| node.segments.len()).sum() {
                self.report(segment, usize::MAX)?;
                self.watch()?;
                self.report_end(segment)?;
            }
            self.take_effects()?;
        }
        Ok(())
    }

    pub(crate) fn mount(&mut self, node: usize, segments: u8) -> Check {
        let chosen: Vec<usize> = (0..self.nodes[node].segments.len())
            .filter(|&at| segments >> at & 1 == 0 && self.nodes[node].segments[at].mount.is_none())
            .collect();
        // A disk is mounted before its node's memory as often as after it.
        let disk_first = self.mounts.is_multiple_of(2);
        for at in chosen {
            let session = *self.nodes[node].session.get_or_insert_with(|| {
                self.sessions += 1;
                SessionId(u64::from(self.term.get()) << 40 | self.sessions)
            });
            self.mounts += 1;
            if disk_first {
                self.mount_disk(node);
            }
            let node = &mut self.nodes[node];
            let synced = node.sync_mark(self.now.mono);
            let segment = &mut node.segments[at];
            if self.now.mono > segment.wiped_after {
                segment.wipe();
            }
            let (term, occupied) = (segment.term, !segment.is_empty());
            let one_sided = is_one_sided(node.id);
            let spec = MountSpec {
                node: node.id,
                session,
                segment: segment.id,
                generation: segment.generation,
                medium: Medium::Memory,
                units: segment.units,
                slots: segment.words.len() as u32,
                labels: ["", rack_of(node.id), "zone"],
                tenant: None,
                term,
                has_records: occupied,
                synced,
                one_sided,
            };
            let mounted = self.group.mount(self.now, &spec, &mut self.effects);
            ensure!(mounted.is_ok_and(|mount| mount.report == occupied), "response to a mount: {mounted:?}");
            let delay = if term == Term::ZERO || !one_sided {
                Duration::ZERO
            } else {
                self.group.config().reallocation_delay
            };
            segment.term = self.term;
            segment.mounted_as = self.mounts;
            let stream = if occupied { segment.snapshot() } else { Default::default() };
            segment.mount = Some(MountModel {
                number: self.mounts,
                usable_at: self.now.mono.after(delay),
                ended: !occupied,
                sent: 0,
                snapshot: stream.len() as u64,
                stream,
                known_ready: BTreeMap::new(),
                commanded: BTreeSet::new(),
            });
        }
        self.mount_disk(node);
        Ok(())
    }

    pub(crate) fn unmount(&mut self, number: usize) -> Check {
        let (node, at) = self.segment_at(number);
        if self.nodes[node].segments[at].mount.is_none() {
            return Ok(());
        }
        let name = (self.nodes[node].id, self.nodes[node].segments[at].id);
        let unmounted = self.group.unmount(self.now, name.0, name.1, &mut self.effects);
        ensure!(unmounted.is_ok(), "unmount refused with {unmounted:?}");
        let segment = &mut self.nodes[node].segments[at];
        segment.mount = None;
        segment.wipe();
        Ok(())
    }

    pub(crate) fn foreign_term(&mut self, number: usize) -> Check {
        let (node, at) = self.segment_at(number);
        let segment = &self.nodes[node].segments[at];
        let (name, generation) = ((self.nodes[node].id, segment.id), segment.generation);
        let (older, newer) =
            (Term::new(self.term.get() - 1).unwrap(), Term::new(self.term.get() + 1).unwrap());
        let mut effects = vec![];
        let response = self.group.report(self.now, name, generation, older, 0, [], &mut effects);
        ensure!(
            response == Err(ErrorCode::StaleTerm) && effects.is_empty(),
            "response to an older term: {response:?}, {effects:?}"
        );
        let response = self.group.report_end(self.now, name, generation, newer, 0, &mut effects);
        let steps_down = effects == [Effect::StepDown { seen: newer }];
        ensure!(
            response == Err(ErrorCode::WrongMaster) && steps_down,
            "response to a newer term: {response:?}, {effects:?}"
        );
        Ok(())
    }

    pub(crate) fn crash(&mut self) {
        // The new master treats a node that stays away for longer than it waits as unknown.
        let wiped_after = self.now.mono.after(self.group.config().report_wait - Duration::from_millis(1));
        for node in &mut self.nodes {
            node.disconnect(wiped_after);
        }
        self.term = Term::new(self.term.get() + 1).unwrap();
        let config =
            GroupConfig { exclusion: self.exclusion, ..config(self.term, self.placement, self.offload) };
        self.group = Group::new(config, self.now);
        self.watcher = Default::default();
        self.removals.clear();
        self.replaced.clear();
        self.forced_job = false;
        self.any_job = false;
        self.jobs.clear();
        for put in &mut self.puts {
            put.pin = put.pin_stored;
            put.removal_pending = false;
        }
        self.add_tenants();
    }

    pub(crate) fn add_tenants(&mut self) {
        for (tenant, quota) in TENANTS.into_iter().zip(self.quotas) {
            let index = self.group.tenant(Tenant::new(tenant).unwrap()).unwrap();
            self.group.set_quota(index, quota);
        }
    }
}
