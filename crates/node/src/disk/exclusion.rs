//! Exclusion of a directory that fails or does not respond, while others work. Its records are gone, and it is emptied before
//! it is used again.
//!
//! A removal must be durable in all directories before the reply, so one that fails would make all removals of the node
//! uncertain.

use std::sync::Arc;
use std::time::Duration;

use moontide_disk::RecordId;
use moontide_rt::sync::mpsc::{Receiver, RecvTimeoutError};
use moontide_rt::time::Instant;
use moontide_types::ErrorCode;
use tracing::{error, warn};

use super::DiskTier;
use super::device::Device;
use super::test_hooks::Mutation;

/// Longest time between two checks.
const CHECK_INTERVAL_MAX: Duration = Duration::from_millis(250);

/// Runs the thread that watches the directories, until `stopped` is disconnected.
pub(super) fn run(tier: &DiskTier, stopped: &Receiver<()>) {
    let exclude_after = tier.config.exclude_after;
    let interval = (exclude_after / 8).clamp(Duration::from_millis(1), CHECK_INTERVAL_MAX);
    let mut failed_at: Option<Instant> = None;
    while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
        // An exclusion that failed is tried again after the same time.
        if failed_at.is_some_and(|at| at.elapsed() < exclude_after) {
            continue;
        }
        // Removals are retried after each pause of writes: a longer time without a failure means nothing.
        let forget_after = exclude_after.max(2 * tier.write_pause);
        let bad_for = |device: &Device| device.health.bad_for(forget_after);
        let (bad, others): (Vec<_>, Vec<_>) =
            tier.devices().partition(|device| bad_for(device) >= exclude_after);
        // The others must work: an exclusion is written to them. If all fail, the reason is a common one. One that may be bad
        // as well is bad or works soon.
        let others_work = others.iter().all(|device| bad_for(device) < exclude_after / 2);
        if bad.is_empty() || others.is_empty() || !others_work {
            continue;
        }
        failed_at = match tier.exclude(&bad) {
            Ok(()) => None,
            Err(error) => {
                let dirs: Vec<String> = bad.iter().map(|device| device.dir.display().to_string()).collect();
                error!(?dirs, %error, "disk directories fail, and cannot be excluded; removals may stay pending");
                Some(Instant::now())
            }
        };
    }
}

impl DiskTier {
    /// Excludes directories durably, notifies the masters that their records are gone, and replies to removals that waited
    /// for them.
    pub(super) fn exclude(&self, devices: &[&Arc<Device>]) -> std::io::Result<()> {
        if !self.test_hooks.mutation.is_enabled(Mutation::ExcludedInMemory) {
            let numbers: Vec<usize> = devices.iter().map(|device| device.number).collect();
            self.members.lock().exclude(&numbers)?;
        }
        devices.iter().for_each(|device| device.set_excluded());
        devices.iter().for_each(|device| self.drop_excluded(device));
        Ok(())
    }

    fn drop_excluded(&self, device: &Device) {
        *device.offloads.lock() = None;
        *device.removals.lock() = None;
        self.stop_loads(device, ErrorCode::DiskError);
        self.fail_loads(device);
        // An eviction that begins meanwhile moves its records from one of the two to the other.
        let guard = self.notify_lock.lock();
        let mut names = device.backend.names();
        names.extend(device.evictions.lock().running.values().flatten());
        let records = names.len();
        let gone: Vec<RecordId> = names.into_iter().filter(|name| self.is_gone(name)).collect();
        self.send_gone(&gone);
        drop(guard);
        warn!(
            dir = %device.dir.display(),
            records,
            "disk directory excluded: it fails or does not respond; its records are dropped, and it is used again after \
             a restart"
        );
        self.give_up_promotions(device);
        self.give_up_removals(device);
        self.move_offloads(device);
    }
}
