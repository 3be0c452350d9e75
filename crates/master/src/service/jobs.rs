//! Jobs over all groups: their numbers, and how far they are.

use std::collections::BTreeMap;

use moontide_meta::{JobId, JobKind, JobState as MetaState};
use moontide_proto::convert::{
    DrainSegmentRequest, GetJobRequest, JobProgress, JobState, JobStatus, RemoveAllRequest,
    RemoveByPrefixRequest, RemoveByRegexRequest, RequestContext, ResponseContext, Wire,
};
use moontide_proto::v1;
use moontide_types::{ErrorCode, NodeId, SegmentId, Tenant, TenantGeneration};

use super::{MAP_VERSION, Service, refused};

/// Jobs that are remembered, running or not.
const JOBS_MAX: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Jobs {
    count: u64,
    all: BTreeMap<u64, JobParts>,
}

#[derive(Clone, Debug)]
enum JobParts {
    /// One part per group.
    Removal(Vec<JobId>),
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
    pub fn remove_all(&self, m: &v1::RemoveAllRequest) -> v1::StartJobResponse {
        let request = RemoveAllRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            Ok(request)
        });
        if let Ok(request) = &request
            && request.force
        {
            let mut tenants = self.tenants.write();
            let facts = tenants.entry_ref(request.context.tenant.as_str()).or_default();
            facts.generation = TenantGeneration(facts.generation.0.saturating_add(1));
        }
        self.start_job(request.map(|request| (request.context, Ok(JobKind::All), request.force)))
    }

    /// Lets no new object into a segment, and evicts what is in it if asked to.
    pub fn drain_segment(&self, m: &v1::DrainSegmentRequest) -> v1::StartJobResponse {
        let started = DrainSegmentRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            let (node, segment) = (request.segment.node, request.segment.segment);
            let found = (0..self.groups.len()).find_map(|index| {
                let view = self.group(index).find_segment(node, segment)?;
                Some((index, view.units))
            });
            let (group, units) = found.ok_or(ErrorCode::NotFound)?;
            self.group(group).drain(node, segment, request.evict)?;
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
                    map_version: MAP_VERSION,
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
                for (index, &part) in parts.iter().enumerate() {
                    let group = self.group(index);
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
                let view = self.group(group).find_segment(node, segment);
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
        let mut parts = Vec::with_capacity(self.groups.len());
        for index in 0..self.groups.len() {
            let mut group = self.group(index);
            let tenant = group.tenant(tenant)?;
            parts.push(group.start_job(tenant, kind.clone(), force)?);
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
