//! Jobs over all groups: removals by prefix or expression, drains of segments, and their progress.

use std::collections::BTreeMap;

use std::time::Duration;

use moontide_meta::{DrainMode, JobId, JobKind, JobState as MetaState, Quota};
use moontide_proto::convert::{
    DrainNodeRequest, DrainSegmentRequest, GetJobRequest, GetJobResponse, JobState, JobStatus,
    RemoveAllRequest, RemoveByPrefixRequest, RemoveByRegexRequest, RequestContext, ResponseContext, Wire,
};
use moontide_proto::v1;
use moontide_types::{ErrorCode, NodeId, SegmentId, Tenant, TenantGeneration, UnixMillis};

use tokio::sync::oneshot;

use super::{Service, refused};
use crate::election::{Proposal, TenantChange, TenantState};

/// Maximum number of remembered jobs, running or finished.
const JOBS_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Jobs {
    count: u64,
    all: BTreeMap<u64, JobTargets>,
}

#[derive(Clone, Debug)]
enum JobTargets {
    /// One job per group that was hosted at the start. A group that another master hosts now has lost its job.
    Removal { tenant: Box<str>, parts: Vec<(usize, JobId)> },
    /// Drain of a segment of `units` units.
    Drain { node: NodeId, segment: SegmentId, group: usize, units: u32 },
}

impl Jobs {
    /// Adds a job. Its number is not that of a job of an earlier process: that one would be taken for this one.
    fn add(&mut self, parts: JobTargets, now: UnixMillis) -> u64 {
        self.count = now.0.max(self.count + 1);
        self.all.insert(self.count, parts);
        while self.all.len() > JOBS_MAX {
            self.all.pop_first();
        }
        self.count
    }
}

impl Service {
    /// Starts a job that removes every key with a prefix.
    pub fn remove_by_prefix(&self, m: &v1::RemoveByPrefixRequest) -> v1::StartJobResponse {
        self.start_job(
            RemoveByPrefixRequest::from_wire(m)
                .map_err(refused)
                .map(|request| (request.context, Ok(JobKind::Prefix(request.prefix.into())), request.force)),
        )
    }

    /// Starts a job that removes every key that matches an expression.
    pub fn remove_by_regex(&self, m: &v1::RemoveByRegexRequest) -> v1::StartJobResponse {
        self.start_job(RemoveByRegexRequest::from_wire(m).map_err(refused).map(|request| {
            let kind = JobKind::pattern(request.pattern).map_err(|_| ErrorCode::InvalidArgument);
            (request.context, kind, request.force)
        }))
    }

    /// Removes all objects of a tenant. With `force` the generation of the tenant increases, so that all its ids
    /// change and all objects are gone at once; the space is freed in the background. Otherwise leased and pinned
    /// objects remain, with their ids.
    ///
    /// With several masters the caller calls each of them: the first with generation 0 (the next one), the others
    /// with the returned generation.
    pub async fn remove_all(&self, m: &v1::RemoveAllRequest) -> v1::StartJobResponse {
        let mut request = RemoveAllRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            Ok(request)
        });
        if let Ok(RemoveAllRequest { context, force: true, generation }) = request {
            let change = match generation {
                0 => TenantChange::NextGeneration,
                generation => TenantChange::AtLeast { generation },
            };
            if let Err(code) = self.change_tenant(&context, change).await {
                request = Err(code);
            }
        }
        let generation = request.as_ref().map_or(0, |r| self.tenant_info(r.context.tenant).generation.0);
        let mut response =
            self.start_job(request.map(|request| (request.context, Ok(JobKind::All), request.force)));
        if let Some(context) = &mut response.context {
            context.tenant_generation = generation;
        }
        response
    }

    /// Returns the state of a tenant.
    pub(crate) fn tenant_state(&self, tenant: &str) -> TenantState {
        let info = self.tenants.read().get(tenant).copied().unwrap_or_default();
        TenantState {
            generation: info.generation.0,
            bytes_max: info.quota.bytes_max,
            objects_max: info.quota.objects_max,
        }
    }

    /// Sets the state of a tenant. Reports of nodes may have raised the generation in the meantime.
    pub(crate) fn set_tenant_state(&self, tenant: &str, state: TenantState) {
        let mut tenants = self.tenants.write();
        let info = tenants.entry_ref(tenant).or_default();
        info.generation = info.generation.max(TenantGeneration(state.generation));
        info.quota = Quota { bytes_max: state.bytes_max, objects_max: state.objects_max };
    }

    /// Changes the state of a tenant: in the cluster state, in the file of a single master, or only here if there is none.
    pub(super) async fn change_tenant(
        &self,
        context: &RequestContext<'_>,
        change: TenantChange,
    ) -> Result<(), ErrorCode> {
        let tenant = context.tenant.as_str();
        let Some(proposals) = self.proposals.get() else {
            self.set_tenant_state(tenant, change.apply(self.tenant_state(tenant)));
            return Ok(());
        };
        let (agreed, agreement) = oneshot::channel();
        let proposal = Proposal { tenant: tenant.to_owned(), change, agreed };
        let timeout = Duration::from_millis(context.timeout_ms.into());
        let proposed = async {
            proposals.send(proposal).await.map_err(|_| ErrorCode::Unreachable)?;
            agreement.await.map_err(|_| ErrorCode::Unreachable)
        };
        tokio::time::timeout(timeout, proposed).await.map_err(|_| ErrorCode::DeadlineExceeded)?.map(|_| ())
    }

    /// Starts to drain a segment: it accepts no new objects. Its objects move to other segments, or with `evict` are
    /// evicted.
    pub fn drain_segment(&self, m: &v1::DrainSegmentRequest) -> v1::StartJobResponse {
        let started = DrainSegmentRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            let (node, segment) = (request.segment.node, request.segment.segment);
            let found = self.hosted().find_map(|group| {
                let view = group.find_segment(node, segment)?;
                Some((group.index, view.units))
            });
            let (group, units) = found.ok_or(ErrorCode::NotFound)?;
            let mode = if request.evict { DrainMode::Evict } else { DrainMode::Move };
            self.group(group)?.drain(node, segment, mode)?;
            let targets = JobTargets::Drain { node, segment, group, units };
            Ok((self.jobs.lock().add(targets, self.now().unix), 1))
        });
        self.job_response(started)
    }

    /// Starts or ends the drain of a node. The node learns it with its next heartbeat, and tells all masters.
    pub fn drain_node(&self, m: &v1::DrainNodeRequest) -> v1::DrainNodeResponse {
        let ordered = DrainNodeRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            let nodes = self.nodes.read();
            let sessions = nodes.values().filter(|session| session.node == request.node);
            // A node that registers again has two sessions for a short time.
            let newest = sessions.max_by_key(|session| session.session()).ok_or(ErrorCode::NotFound)?;
            newest.order_drain(!request.undrain);
            Ok(())
        });
        let context = ordered.map_or_else(|code| self.refusal(code), |()| self.context(None));
        v1::DrainNodeResponse { context: Some(context) }
    }

    /// Returns the progress of a job of the caller's tenant, or of the drain of a segment.
    pub fn get_job(&self, m: &v1::GetJobRequest) -> v1::GetJobResponse {
        let found = GetJobRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            let targets = self.job_targets(request.job)?;
            match &targets {
                JobTargets::Removal { tenant, .. } if **tenant != *request.context.tenant.as_str() => {
                    Err(ErrorCode::NotFound)
                }
                _ => Ok(targets),
            }
        });
        self.status_response(found)
    }

    /// Returns the progress of a job of any tenant, for operators.
    pub(crate) fn get_any_job(&self, job: u64) -> v1::GetJobResponse {
        self.status_response(self.job_targets(job))
    }

    fn job_targets(&self, job: u64) -> Result<JobTargets, ErrorCode> {
        self.jobs.lock().all.get(&job).cloned().ok_or(ErrorCode::NotFound)
    }

    fn status_response(&self, targets: Result<JobTargets, ErrorCode>) -> v1::GetJobResponse {
        match targets {
            Ok(targets) => {
                let context = ResponseContext {
                    map_version: self.map_version(),
                    term: self.config.term,
                    ..Default::default()
                };
                GetJobResponse::new(context, self.job_status(&targets)).to_wire()
            }
            Err(code) => v1::GetJobResponse { context: Some(self.refusal(code)), ..Default::default() },
        }
    }

    fn job_status(&self, parts: &JobTargets) -> JobStatus {
        let mut sum = JobStatus { state: JobState::Done, examined: 0, affected: 0, skipped: 0, total: 0 };
        match parts {
            JobTargets::Removal { parts, .. } => {
                let mut is_lost = false;
                for &(index, part) in parts {
                    let group = self.group_for_node(index).ok();
                    let Some((group, status)) = group.and_then(|group| {
                        let status = group.job(part)?;
                        Some((group, status))
                    }) else {
                        is_lost = true;
                        continue;
                    };
                    sum.examined += status.scanned;
                    sum.affected += status.removed;
                    sum.skipped += status.kept;
                    if status.state == MetaState::Running {
                        sum.state = JobState::Running;
                        sum.total += group.objects() as u64;
                    }
                }
                sum.total = sum.total.max(sum.examined);
                if is_lost {
                    sum.state = JobState::Failed(ErrorCode::WrongMaster);
                } else if sum.state == JobState::Done && self.is_unconfirmed() {
                    // Another master may own the groups already, with objects that this master does not know.
                    sum.state = JobState::Running;
                }
            }
            &JobTargets::Drain { node, segment, group, units } => {
                let view =
                    self.group_for_node(group).ok().and_then(|group| group.find_segment(node, segment));
                let left = view.map_or(0, |view| u64::from(view.live_units + view.reserved_units));
                // Progress in units: the number of objects of a segment is unknown.
                sum.total = units.into();
                sum.affected = sum.total.saturating_sub(left);
                sum.examined = sum.affected;
                sum.state = if left > 0 { JobState::Running } else { JobState::Done };
            }
        }
        sum
    }

    fn start_job(
        &self,
        request: Result<(RequestContext<'_>, Result<JobKind, ErrorCode>, bool), ErrorCode>,
    ) -> v1::StartJobResponse {
        let started = request.and_then(|(context, kind, force)| {
            self.caller(context)?;
            self.start_in_groups(context.tenant, kind?, force)
        });
        self.job_response(started)
    }

    /// Starts a removal in all hosted groups. Returns the job and the number of groups.
    fn start_in_groups(
        &self,
        tenant: Tenant<'_>,
        kind: JobKind,
        force: bool,
    ) -> Result<(u64, u32), ErrorCode> {
        // A group in a handoff would lose the job. Nothing is started then: the caller repeats the call.
        for index in 0..self.group_slots.len() {
            match self.group(index) {
                Ok(_) | Err(ErrorCode::WrongMaster) => {}
                Err(code) => return Err(code),
            }
        }
        let mut parts = Vec::with_capacity(self.group_slots.len());
        for index in 0..self.group_slots.len() {
            let mut group = match self.group(index) {
                Ok(group) => group,
                Err(ErrorCode::WrongMaster) => continue,
                Err(code) => return Err(code),
            };
            let tenant = group.tenant(tenant)?;
            parts.push((index, group.start_job(tenant, kind.clone(), force)?));
        }
        let groups = parts.len() as u32;
        let targets = JobTargets::Removal { tenant: tenant.as_str().into(), parts };
        Ok((self.jobs.lock().add(targets, self.now().unix), groups))
    }

    fn job_response(&self, started: Result<(u64, u32), ErrorCode>) -> v1::StartJobResponse {
        match started {
            Ok((job, groups)) => v1::StartJobResponse { context: Some(self.context(None)), job, groups },
            Err(code) => v1::StartJobResponse { context: Some(self.refusal(code)), job: 0, groups: 0 },
        }
    }
}
