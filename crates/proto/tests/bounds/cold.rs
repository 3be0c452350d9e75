//! Limits of calls that are not hot: operators' calls and invalidations.

use super::*;

#[test]
fn operator_message_limits_are_enforced() {
    edge!(RemoveByPrefixRequest, TooLarge, |m| m.prefix = vec![1; KEY_BYTES_MAX].into(), {
        m.prefix = vec![1; KEY_BYTES_MAX + 1].into()
    });
    edge!(RemoveByPrefixRequest, InvalidArgument, |m| m.prefix = vec![1].into(), m.prefix = Bytes::new());
    edge!(RemoveByRegexRequest, TooLarge, |m| m.pattern = "a".repeat(PATTERN_BYTES_MAX), m.pattern.push('a'));
    edge!(RemoveByRegexRequest, InvalidArgument, |m| m.pattern = "a".into(), m.pattern.clear());
    edge!(RemoveAllRequest, InvalidArgument, |m| context!(m).tenant = "t".into(), context!(m).tenant.clear());
    macro_rules! group_list {
        ($($message:ident.$groups:ident)*) => {$(
            edge!($message, TooLarge, |m| m.$groups = vec![0; GROUPS_MAX.into()], m.$groups.push(0));
            edge!($message, TooLarge, |m| m.$groups = vec![4095], m.$groups[0] = 4096);
        )*};
    }
    group_list!(RemoveByPrefixRequest.groups RemoveByRegexRequest.groups RemoveAllRequest.groups GetJobRequest.groups);
    group_list!(GetJobResponse.lost_groups);
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
    edge!(DrainNodeRequest, InvalidArgument, |m| m.node = 1, m.node = 0);
    edge!(GetJobResponse, Unsupported, |m| (m.state, m.code) = (2, 0), m.state = 0);
    edge!(GetJobResponse, Unsupported, |m| (m.state, m.code) = (2, 0), m.code = 77_777);
    edge!(GetClusterInfoResponse, InvalidArgument, |m| m.protocol_max = 1, m.protocol_min = 2);
}

#[test]
fn invalidation_message_limits_are_enforced() {
    let cursor = v1::InvalidationCursor { group: 1, term: 2, next_sequence: 3 };
    edge!(PollInvalidationsRequest, TooLarge, |m| m.cursors = vec![cursor; GROUPS_MAX.into()], {
        m.cursors.push(m.cursors[0])
    });
    edge!(PollInvalidationsRequest, InvalidArgument, |m| m.cursors.truncate(1), m.cursors.clear());
    edge!(PollInvalidationsRequest, TooLarge, |m| m.wait_ms = INVALIDATIONS_WAIT_MS_MAX, m.wait_ms += 1);
    edge!(PollInvalidationsRequest, TooLarge, |m| m.cursors[0].group = 4095, m.cursors[0].group = 4096);
    edge!(PollInvalidationsRequest, InvalidArgument, |m| m.cursors[0].term = Term::MAX.get(), {
        m.cursors[0].term += 1
    });
    let invalidated = |ids: usize| v1::GroupInvalidations {
        group: 1,
        code: 0,
        term: 1,
        next_sequence: 1,
        gap: false,
        ids: vec![7; 16 * ids].into(),
    };
    let largest = || vec![invalidated(INVALIDATIONS_PER_RESPONSE_MAX - 1), invalidated(1)];
    edge!(PollInvalidationsResponse, TooLarge, |m| m.groups = largest(), m.groups.push(invalidated(1)));
    edge!(PollInvalidationsResponse, TooLarge, |m| m.groups = vec![invalidated(0); GROUPS_MAX.into()], {
        m.groups.push(invalidated(0))
    });
    edge!(PollInvalidationsResponse, InvalidArgument, |m| m.groups = vec![invalidated(2)], {
        m.groups[0].ids = vec![7; 31].into()
    });
    edge!(
        PollInvalidationsResponse,
        InvalidArgument,
        |m| m.groups = vec![invalidated(2)],
        m.groups[0].next_sequence = 0
    );
    edge!(PollInvalidationsResponse, TooLarge, |m| m.groups = vec![invalidated(2)], m.groups[0].group = 4096);
    edge!(
        PollInvalidationsResponse,
        Unsupported,
        |m| m.groups = vec![invalidated(2)],
        m.groups[0].code = 77_777
    );
    edge!(PollInvalidationsResponse, InvalidArgument, |m| m.groups = vec![invalidated(2)], {
        m.groups[0].code = ErrorCode::WrongMaster as u32
    });
}
