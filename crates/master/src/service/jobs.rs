//! Jobs over all groups: removals by prefix or expression, drains of segments, and their progress.

use std::collections::{BTreeMap, HashSet};

use std::time::Duration;

use moontide_meta::{DrainMode, JobId, JobKind, JobState as MetaState, Quota, TENANTS_MAX};
use moontide_proto::convert::{
    DrainNodeRequest, DrainSegmentRequest, GetJobRequest, GetJobResponse, JobState, JobStatus,
    RemoveAllRequest, RemoveByPrefixRequest, RemoveByRegexRequest, RequestContext, ResponseContext, Wire,
};
use moontide_proto::v1;
use moontide_types::{ErrorCode, GroupId, NodeId, SegmentId, Tenant, TenantGeneration, Term, UnixMillis};

use tokio::sync::oneshot;

use super::{Service, TenantInfo, refused};
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
    /// One job per group that was hosted at the start. A group that another master hosts now has lost its job: the caller
    /// starts it again there.
    Removal { tenant: Box<str>, parts: Vec<RemovalPart> },
    /// Drain of a segment of `units` units.
    Drain { node: NodeId, segment: SegmentId, group: usize, units: u32 },
}

/// Job of one group.
#[derive(Clone, Copy, Debug)]
struct RemovalPart {
    group: usize,
    /// Term of the group at the start. A group that has left and returned counts its jobs from 1 again, and must not be
    /// taken for the one that had the job.
    term: Term,
    job: JobId,
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
        self.start_job(RemoveByPrefixRequest::from_wire(m).map_err(refused).map(|r| StartJob {
            context: r.context,
            kind: Ok(JobKind::Prefix(r.prefix.into())),
            force: r.force,
            groups: r.groups,
        }))
    }

    /// Starts a job that removes every key that matches an expression.
    pub fn remove_by_regex(&self, m: &v1::RemoveByRegexRequest) -> v1::StartJobResponse {
        self.start_job(RemoveByRegexRequest::from_wire(m).map_err(refused).map(|request| {
            let kind = JobKind::pattern(request.pattern).map_err(|_| ErrorCode::InvalidArgument);
            StartJob { context: request.context, kind, force: request.force, groups: request.groups }
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
        if let Ok(RemoveAllRequest { context, force: true, generation, .. }) = request {
            let change = match generation {
                0 => TenantChange::NextGeneration,
                generation => TenantChange::AtLeast { generation },
            };
            if let Err(code) = self.change_tenant(&context, change).await {
                request = Err(code);
            }
        }
        let generation = request.as_ref().map_or(0, |r| self.tenant_info(r.context.tenant).generation.0);
        let mut response = self.start_job(request.map(|r| StartJob {
            context: r.context,
            kind: Ok(JobKind::All),
            force: r.force,
            groups: r.groups,
        }));
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

    /// Sets the state of a tenant. Reports of nodes may have raised the generation in the meantime. A tenant without a quota
    /// and a generation is forgotten.
    pub(crate) fn set_tenant_state(&self, tenant: &str, state: TenantState) {
        let mut tenants = self.tenants.write();
        let info = tenants.entry_ref(tenant).or_default();
        info.generation = info.generation.max(TenantGeneration(state.generation));
        info.quota = Quota { bytes_max: state.bytes_max, objects_max: state.objects_max };
        if *info == TenantInfo::default() {
            tenants.remove(tenant);
        }
    }

    /// Changes the state of a tenant: in the cluster state, in the file of a single master, or only here if there is none.
    pub(super) async fn change_tenant(
        &self,
        context: &RequestContext<'_>,
        change: TenantChange,
    ) -> Result<(), ErrorCode> {
        let tenant = context.tenant.as_str();
        {
            // Each state is durable, and a generation is never forgotten: there must not be one per invented name.
            let known = self.tenants.read();
            if known.len() >= TENANTS_MAX && !known.contains_key(tenant) {
                return Err(ErrorCode::TooManyTenants);
            }
        }
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
            Ok((self.jobs.lock().add(targets, self.now().unix), vec![group]))
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
            let newest = sessions.max_by_key(|session| session.number()).ok_or(ErrorCode::NotFound)?;
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
        self.status_response(found, &m.groups)
    }

    /// Returns the progress of a job of any tenant, for operators.
    pub(crate) fn get_any_job(&self, job: u64) -> v1::GetJobResponse {
        self.status_response(self.job_targets(job), &[])
    }

    fn job_targets(&self, job: u64) -> Result<JobTargets, ErrorCode> {
        self.jobs.lock().all.get(&job).cloned().ok_or(ErrorCode::NotFound)
    }

    fn status_response(&self, targets: Result<JobTargets, ErrorCode>, groups: &[u32]) -> v1::GetJobResponse {
        match targets {
            Ok(targets) => {
                let context = ResponseContext {
                    map_version: self.map_version(),
                    term: self.config.term,
                    ..Default::default()
                };
                GetJobResponse::new(context, self.job_status(&targets, groups)).to_wire()
            }
            Err(code) => v1::GetJobResponse { context: Some(self.refusal(code)), ..Default::default() },
        }
    }

    fn job_status(&self, parts: &JobTargets, groups: &[u32]) -> JobStatus {
        let (state, lost) = (JobState::Done, vec![]);
        let mut sum = JobStatus { state, examined: 0, affected: 0, skipped: 0, total: 0, lost };
        match parts {
            JobTargets::Removal { parts, .. } => {
                let asked: HashSet<usize> = groups.iter().map(|&group| group as usize).collect();
                for part in parts.iter().filter(|part| asked.is_empty() || asked.contains(&part.group)) {
                    self.add_removal_part(part, &mut sum);
                }
                sum.total = sum.total.max(sum.examined);
                if !sum.lost.is_empty() {
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

    /// Adds the state of the job of one group.
    fn add_removal_part(&self, part: &RemovalPart, sum: &mut JobStatus) {
        let group = match self.group(part.group) {
            Ok(group) => group,
            Err(ErrorCode::WrongMaster) => return sum.lost.push(GroupId(part.group as u16)), // < GROUPS_MAX
            // The next owner may know objects that this master removes from now on: the part is not done here.
            Err(_) => {
                sum.state = JobState::Running;
                return;
            }
        };
        let status = if group.term() == part.term { group.job(part.job) } else { None };
        let Some(status) = status else {
            return sum.lost.push(GroupId(part.group as u16)); // < GROUPS_MAX
        };
        sum.examined += status.scanned;
        sum.affected += status.removed;
        sum.skipped += status.kept;
        if status.state == MetaState::Running {
            sum.state = JobState::Running;
            sum.total += group.objects() as u64;
        }
    }

    fn start_job(&self, request: Result<StartJob<'_>, ErrorCode>) -> v1::StartJobResponse {
        let started = request.and_then(|StartJob { context, kind, force, groups }| {
            self.caller(context)?;
            self.start_in_groups(context.tenant, kind?, force, groups)
        });
        self.job_response(started)
    }

    /// Starts a removal in the groups of the request that are hosted here; without any in all of them. Returns the job and
    /// its groups.
    fn start_in_groups(
        &self,
        tenant: Tenant<'_>,
        kind: JobKind,
        force: bool,
        groups: &[u32],
    ) -> Result<(u64, Vec<usize>), ErrorCode> {
        let asked: HashSet<usize> = groups.iter().map(|&group| group as usize).collect();
        let is_asked = |index: &usize| asked.is_empty() || asked.contains(index);
        // A caller that names no groups wants all of them: nothing is started unless each can.
        if asked.is_empty() {
            let codes = (0..self.group_slots.len()).filter_map(|index| self.group(index).err());
            if let Some(code) = { codes }.find(|&code| code != ErrorCode::WrongMaster) {
                return Err(code);
            }
        }
        let (mut parts, mut refused) = (vec![], None);
        for index in (0..self.group_slots.len()).filter(is_asked) {
            let mut group = match self.group(index) {
                Ok(group) => group,
                Err(ErrorCode::WrongMaster) => continue,
                // A group in a handoff would lose the job. The caller repeats the call for it.
                Err(code) => {
                    refused = Some(code);
                    continue;
                }
            };
            let tenant = group.tenant(tenant)?;
            let job = group.start_job(tenant, kind.clone(), force)?;
            parts.push(RemovalPart { group: index, term: group.term(), job });
        }
        // A caller that names no groups wants all of them; one that names some gets those that can start.
        match refused {
            Some(code) if asked.is_empty() || parts.is_empty() => return Err(code),
            None if parts.is_empty() && !asked.is_empty() => return Err(ErrorCode::WrongMaster),
            _ => {}
        }
        let started = parts.iter().map(|part| part.group).collect();
        let targets = JobTargets::Removal { tenant: tenant.as_str().into(), parts };
        Ok((self.jobs.lock().add(targets, self.now().unix), started))
    }

    fn job_response(&self, started: Result<(u64, Vec<usize>), ErrorCode>) -> v1::StartJobResponse {
        match started {
            Ok((job, groups)) => {
                let groups = groups.into_iter().map(|group| group as u32).collect(); // < GROUPS_MAX
                v1::StartJobResponse { context: Some(self.context(None)), job, groups }
            }
            Err(code) => v1::StartJobResponse { context: Some(self.refusal(code)), ..Default::default() },
        }
    }
}

/// A removal that is to start.
struct StartJob<'a> {
    context: RequestContext<'a>,
    kind: Result<JobKind, ErrorCode>,
    force: bool,
    /// Groups in which it runs; empty for all.
    groups: &'a [u32],
}
