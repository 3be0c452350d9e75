//! Bounds of calls that are not hot: those of operators, and of those who watch.

use super::*;

#[test]
fn operators() {
    edge!(RemoveByPrefixRequest, TooLarge, |m| m.prefix = vec![1; KEY_BYTES_MAX].into(), {
        m.prefix = vec![1; KEY_BYTES_MAX + 1].into()
    });
    edge!(RemoveByPrefixRequest, InvalidArgument, |m| m.prefix = vec![1].into(), m.prefix = Bytes::new());
    edge!(RemoveByRegexRequest, TooLarge, |m| m.pattern = "a".repeat(PATTERN_BYTES_MAX), m.pattern.push('a'));
    edge!(RemoveByRegexRequest, InvalidArgument, |m| m.pattern = "a".into(), m.pattern.clear());
    edge!(RemoveAllRequest, InvalidArgument, |m| context!(m).tenant = "t".into(), context!(m).tenant.clear());
    macro_rules! page {
        ($m:ident) => {
            $m.page.as_mut().unwrap()
        };
    }
    edge!(ListKeysRequest, TooLarge, |m| page!(m).limit = BATCH_KEYS_MAX as u32, page!(m).limit += 1);
    edge!(ListKeysRequest, InvalidArgument, |m| page!(m).limit = 1, page!(m).limit = 0);
    edge!(GetTenantsRequest, InvalidArgument, |m| page!(m).limit = 1, m.page = None);
    edge!(ListSegmentsRequest, TooLarge, |m| page!(m).cursor = vec![1; CURSOR_BYTES_MAX].into(), {
        page!(m).cursor = vec![1; CURSOR_BYTES_MAX + 1].into()
    });
    edge!(ListKeysRequest, TooLarge, |m| m.prefix = vec![1; KEY_BYTES_MAX].into(), {
        m.prefix = vec![1; KEY_BYTES_MAX + 1].into()
    });
    edge!(EvictRequest, TooLarge, |m| m.target_permille = 1000, m.target_permille = 1001);
    edge!(DrainSegmentRequest, InvalidArgument, |m| m.evict = true, m.segment = None);
    edge!(JobProgress, Unsupported, |m| (m.state, m.code) = (2, 0), m.state = 0);
    edge!(JobProgress, Unsupported, |m| (m.state, m.code) = (2, 0), m.code = 77_777);
    edge!(ClusterInfo, InvalidArgument, |m| m.protocol_max = 1, m.protocol_min = 2);
}

#[test]
fn departures() {
    let cursor = v1::DepartureCursor { group: 1, term: 2, next: 3 };
    edge!(GetDeparturesRequest, TooLarge, |m| m.cursors = vec![cursor; GROUPS_MAX.into()], {
        m.cursors.push(m.cursors[0])
    });
    edge!(GetDeparturesRequest, InvalidArgument, |m| m.cursors.truncate(1), m.cursors.clear());
    edge!(GetDeparturesRequest, TooLarge, |m| m.wait_ms = DEPARTURES_WAIT_MS_MAX, m.wait_ms += 1);
    edge!(GetDeparturesRequest, TooLarge, |m| m.cursors[0].group = 4095, m.cursors[0].group = 4096);
    edge!(GetDeparturesRequest, InvalidArgument, |m| m.cursors[0].term = Term::MAX.get(), {
        m.cursors[0].term += 1
    });
    let told = |ids: usize| v1::GroupDepartures {
        group: 1,
        code: 0,
        term: 1,
        next: 1,
        gap: false,
        ids: vec![7; 16 * ids].into(),
    };
    let fullest = || vec![told(DEPARTURES_PER_ANSWER_MAX - 1), told(1)];
    edge!(GetDeparturesResponse, TooLarge, |m| m.groups = fullest(), m.groups.push(told(1)));
    edge!(GetDeparturesResponse, TooLarge, |m| m.groups = vec![told(0); GROUPS_MAX.into()], {
        m.groups.push(told(0))
    });
    edge!(GetDeparturesResponse, InvalidArgument, |m| m.groups = vec![told(2)], {
        m.groups[0].ids = vec![7; 31].into()
    });
    edge!(GetDeparturesResponse, InvalidArgument, |m| m.groups = vec![told(2)], m.groups[0].next = 0);
    edge!(GetDeparturesResponse, TooLarge, |m| m.groups = vec![told(2)], m.groups[0].group = 4096);
    edge!(GetDeparturesResponse, Unsupported, |m| m.groups = vec![told(2)], m.groups[0].code = 77_777);
    edge!(GetDeparturesResponse, InvalidArgument, |m| m.groups = vec![told(2)], {
        m.groups[0].code = ErrorCode::WrongMaster as u32
    });
}
