//! Contexts of requests and responses, and the parts that many calls have: places, groups, pages, put configurations.

use super::*;

impl Gen {
    pub(crate) fn request(&mut self) -> Option<v1::RequestContext> {
        Some(v1::RequestContext {
            tenant: self.text(1, 20),
            group: self.bool().then(|| self.below(4096) as u32),
            map_version: self.u64(),
            term: self.term().get(),
            caller: self.u64(),
            session: self.u64(),
            timeout_ms: 1 + self.below(600_000) as u32,
            token: self.byte_string(0, 64).into(),
        })
    }

    pub(crate) fn group_map(&mut self) -> v1::GroupMap {
        let master = |g: &mut Gen, groups: Vec<u32>| v1::MasterEntry {
            grpc_address: g.text(1, 30),
            frame_address: g.text(0, 30),
            term: g.term().get(),
            terms: groups.iter().map(|_| g.term().get()).collect(),
            groups,
        };
        let masters = vec![master(self, vec![0, 3]), master(self, vec![1]), master(self, vec![])];
        v1::GroupMap { version: self.u64(), groups: 4, masters, single_master: self.bool() }
    }

    pub(crate) fn response(&mut self) -> Option<v1::ResponseContext> {
        Some(v1::ResponseContext {
            map_version: self.u64(),
            term: self.term().get(),
            code: 0,
            retry_after_ms: self.below(60_001) as u32,
            tenant_generation: self.u32(),
            newer_map: self.bool().then(|| self.group_map()),
        })
    }

    pub(crate) fn segment_ref(&mut self) -> v1::SegmentRef {
        v1::SegmentRef { node: self.u64(), segment: self.below(65_536) as u32 }
    }

    /// Returns numbers of `n` groups.
    pub(crate) fn groups(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(moontide_types::limits::GROUPS_MAX.into()) as u32).collect()
    }

    pub(crate) fn place(&mut self) -> v1::Place {
        let segment = self.bool().then(|| self.below(65_536) as u32);
        v1::Place { node: self.u64(), segment }
    }

    pub(crate) fn page(&mut self) -> Option<v1::Pagination> {
        Some(v1::Pagination { cursor: self.byte_string(0, 50).into(), limit: 1 + self.below(4096) as u32 })
    }

    pub(crate) fn put_config(&mut self) -> v1::PutConfig {
        let replicas = 1 + self.below(8) as u32;
        v1::PutConfig {
            replicas,
            replicas_min: 1 + self.below(replicas.into()) as u32,
            stripes: self.below(1025) as u32,
            preferred: (0..self.below(3)).map(|_| self.place()).collect(),
            local_node: self.u64(),
            upsert: self.bool(),
            one_sided: self.bool(),
            digestless: self.bool(),
            medium: self.below(4) as i32,
            ttl_ms: self.u64() >> 24,
        }
    }
}
