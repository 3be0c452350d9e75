//! Jobs over all groups: their numbers, and how far they are.

use std::collections::BTreeMap;

use std::time::Duration;

use moontide_meta::{JobId, JobKind, JobState as MetaState, Quota};
use moontide_proto::convert::{
    DrainSegmentRequest, GetJobRequest, JobProgress, JobState, JobStatus, RemoveAllRequest,
    RemoveByPrefixRequest, RemoveByRegexRequest, RequestContext, ResponseContext, Wire,
};
use moontide_proto::v1;
use moontide_types::{ErrorCode, NodeId, SegmentId, Tenant, TenantGeneration};

use tokio::sync::oneshot;

use super::{Service, refused};
use crate::election::{Proposal, TenantChange, TenantEntry};

/// Jobs that are remembered, running or not.
const JOBS_MAX: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Jobs {
    count: u64,
    all: BTreeMap<u64, JobParts>,
}

#[derive(Clone, Debug)]
enum JobParts {
    /// One part per group that was hosted when it began.
    Removal(Vec<(usize, JobId)>),
    /// The segment empties.
    Drain { node: NodeId, segment: SegmentId, group: usize, units: u32 },
}

impl Jobs {
    fn add(&mut self, parts: JobParts) -> u64 {
        self.count += 1;
        self.all.insert(self.count, parts);
        while self.all.len() > JOBS_MAX {
            self.all.pop_first();
        }
        self.count
    }
}

impl Service {
    /// Starts removing every key with a prefix.
    pub fn remove_by_prefix(&self, m: &v1::RemoveByPrefixRequest) -> v1::StartJobResponse {
        self.start_job(
            RemoveByPrefixRequest::from_wire(m)
                .map_err(refused)
                .map(|request| (request.context, Ok(JobKind::Prefix(request.prefix.into())), request.force)),
        )
    }

    /// Starts removing every key that an expression matches.
    pub fn remove_by_regex(&self, m: &v1::RemoveByRegexRequest) -> v1::StartJobResponse {
        self.start_job(RemoveByRegexRequest::from_wire(m).map_err(refused).map(|request| {
            let kind = JobKind::pattern(request.pattern).map_err(|_| ErrorCode::InvalidArgument);
            (request.context, kind, request.force)
        }))
    }

    /// Removes everything of a tenant. By force its ids are others from now on, so that everything is gone at once, and space
    /// returns in the background; otherwise what is leased or pinned stays, under the ids it has.
    ///
    /// Where there are several masters, each is asked: the first for the next generation, the others for that one.
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
        let generation = request.as_ref().map_or(0, |r| self.tenant_facts(r.context.tenant).generation.0);
        let mut answer =
            self.start_job(request.map(|request| (request.context, Ok(JobKind::All), request.force)));
        if let Some(context) = &mut answer.context {
            context.tenant_generation = generation;
        }
        answer
    }

    /// Changes what is known of a tenant: here, or, where there are several masters, for all of them.
    pub(super) async fn change_tenant(
        &self,
        context: &RequestContext<'_>,
        change: TenantChange,
    ) -> Result<(), ErrorCode> {
        let tenant = context.tenant.as_str();
        let Some(proposals) = self.proposals.get() else {
            let mut tenants = self.tenants.write();
            let facts = tenants.entry_ref(tenant).or_default();
            let after = change.of(TenantEntry {
                generation: facts.generation.0,
                bytes_max: facts.quota.bytes_max,
                objects_max: facts.quota.objects_max,
            });
            facts.generation = TenantGeneration(after.generation);
            facts.quota = Quota { bytes_max: after.bytes_max, objects_max: after.objects_max };
            return Ok(());
        };
        let (agreed, agreement) = oneshot::channel();
        let proposal = Proposal { tenant: tenant.to_owned(), change, agreed };
        let deadline = Duration::from_millis(context.deadline_ms.into());
        let proposed = async {
            proposals.send(proposal).await.map_err(|_| ErrorCode::Unreachable)?;
            agreement.await.map_err(|_| ErrorCode::Unreachable)
        };
        tokio::time::timeout(deadline, proposed).await.map_err(|_| ErrorCode::DeadlineExceeded)?.map(|_| ())
    }

    /// Lets no new object into a segment, and evicts what is in it if asked to.
    pub fn drain_segment(&self, m: &v1::DrainSegmentRequest) -> v1::StartJobResponse {
        let started = DrainSegmentRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            let (node, segment) = (request.segment.node, request.segment.segment);
            let found = self.hosted().find_map(|group| {
                let view = group.find_segment(node, segment)?;
                Some((group.index, view.units))
            });
            let (group, units) = found.ok_or(ErrorCode::NotFound)?;
            self.group(group)?.drain(node, segment, request.evict)?;
            Ok(self.jobs.lock().add(JobParts::Drain { node, segment, group, units }))
        });
        self.job_answer(started)
    }

    /// How far is a job?
    pub fn get_job(&self, m: &v1::GetJobRequest) -> v1::GetJobResponse {
        let status = GetJobRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            let parts = self.jobs.lock().all.get(&request.job).cloned().ok_or(ErrorCode::NotFound)?;
            Ok(self.job_status(&parts))
        });
        match status {
            Ok(status) => {
                let context = ResponseContext {
                    map_version: self.map_version(),
                    term: self.config.term,
                    ..Default::default()
                };
                JobProgress::new(context, status).to_wire()
            }
            Err(code) => v1::GetJobResponse { context: Some(self.refusal(code)), ..Default::default() },
        }
    }

    fn job_status(&self, parts: &JobParts) -> JobStatus {
        let mut sum = JobStatus { state: JobState::Done, examined: 0, affected: 0, skipped: 0, total: 0 };
        match parts {
            JobParts::Removal(parts) => {
                for &(index, part) in parts {
                    // What has gone to another master is not known here any more.
                    let Ok(group) = self.books(index) else { continue };
                    let Some(status) = group.job(part) else { continue };
                    sum.examined += status.scanned;
                    sum.affected += status.removed;
                    sum.skipped += status.kept;
                    if status.state == MetaState::Running {
                        sum.state = JobState::Running;
                        sum.total += group.objects() as u64;
                    }
                }
                sum.total = sum.total.max(sum.examined);
            }
            &JobParts::Drain { node, segment, group, units } => {
                let view = self.books(group).ok().and_then(|group| group.find_segment(node, segment));
                let left = view.map_or(0, |view| u64::from(view.live_units + view.reserved_units));
                // Units stand in for objects: how many there are of these in one segment is not counted.
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
        self.job_answer(started)
    }

    fn start_in_groups(&self, tenant: Tenant<'_>, kind: JobKind, force: bool) -> Result<u64, ErrorCode> {
        let mut parts = Vec::with_capacity(self.seats.len());
        for index in 0..self.seats.len() {
            let mut group = match self.group(index) {
                Ok(group) => group,
                Err(ErrorCode::WrongMaster) => continue,
                // One that is about to go would take the job with it.
                Err(code) => return Err(code),
            };
            let tenant = group.tenant(tenant)?;
            parts.push((index, group.start_job(tenant, kind.clone(), force)?));
        }
        Ok(self.jobs.lock().add(JobParts::Removal(parts)))
    }

    fn job_answer(&self, started: Result<u64, ErrorCode>) -> v1::StartJobResponse {
        match started {
            Ok(job) => v1::StartJobResponse { context: Some(self.context(None)), job },
            Err(code) => v1::StartJobResponse { context: Some(self.refusal(code)), job: 0 },
        }
    }
}
