//! Servers of a running master: equal responses over both protocols, sessions of nodes, admin endpoints.

mod support;

use std::time::{Duration, Instant};

use moontide_proto::{Bitmap, FrameKind, Handle, Packed, v1};
use moontide_types::ErrorCode;
use serde_json::Value;
use support::*;

fn present(response: &v1::ExistResponse) -> Vec<bool> {
    Bitmap::decode(&response.present, response.count as usize).unwrap().iter().collect()
}

fn codes(response: &v1::OutcomesResponse) -> Vec<u16> {
    response.codes.chunks(2).map(|code| u16::from_le_bytes([code[0], code[1]])).collect()
}

#[test]
fn grpc_and_frame_servers_return_equal_responses() {
    let server = start();
    let addresses = server.addresses();
    let runtime = runtime();
    let (mut grpc, node) = runtime.block_on(async {
        (grpc(addresses.grpc).await, FakeNode::start(addresses.grpc, 11, FakeNodeConfig::default()).await)
    });
    let mut frames = FrameCaller::connect(addresses.frame);
    let info = v1::GetClusterInfoRequest { context: context() };
    let info = runtime.block_on(grpc.get_cluster_info(info)).unwrap().into_inner();
    let names = ["a", "b", "c/d", "e", "f", "g"];
    let ids = ids(&info, &names);

    // Half of the puts use each protocol; objects put over one are read over the other.
    let by_frame: v1::PutStartResponse =
        frames.call(FrameKind::PutStart, &put_start(&names[..3], 5_000)).message();
    let by_grpc = runtime.block_on(grpc.put_start(put_start(&names[3..], 5_000))).unwrap().into_inner();
    assert_eq!(object_codes(&by_frame.objects), [0; 3]);
    assert_eq!(object_codes(&by_grpc.objects), [0; 3]);
    // Another caller gets InProgress over both protocols.
    let mut again = put_start(&names[..3], 5_000);
    again.context.as_mut().unwrap().caller = 78;
    let framed: v1::PutStartResponse = frames.call(FrameKind::PutStart, &again).message();
    assert_eq!(object_codes(&framed.objects), [ErrorCode::InProgress as u16; 3]);
    assert_eq!(framed, runtime.block_on(grpc.put_start(again)).unwrap().into_inner());

    let request = exist(&names);
    let before: v1::ExistResponse = frames.call(FrameKind::Exist, &request).message();
    assert_eq!(present(&before), [false; 6]);
    let ended = runtime.block_on(grpc.put_end(put_end(&ids[..3], &by_frame))).unwrap().into_inner();
    assert_eq!(codes(&ended), [0; 3]);
    let ended: v1::OutcomesResponse = frames.call(FrameKind::PutEnd, &put_end(&ids[3..], &by_grpc)).message();
    assert_eq!(codes(&ended), [0; 3]);

    let framed: v1::ExistResponse = frames.call(FrameKind::Exist, &request).message();
    assert_eq!(framed, runtime.block_on(grpc.exist(request)).unwrap().into_inner());
    assert_eq!(present(&framed), [true; 6]);

    let request = v1::GetReplicaListRequest {
        context: context(),
        keys: keys(["a", "e", "nothing"]),
        lease_ms: 0,
        attributes: false,
    };
    let reply = frames.call(FrameKind::GetReplicaList, &request);
    assert_eq!(reply.header.term, server.term());
    let framed: v1::GetReplicaListResponse = reply.message();
    let other = runtime.block_on(grpc.get_replica_list(request)).unwrap().into_inner();
    assert_eq!(object_codes(&framed.objects), [0, 0, ErrorCode::NotFound as u16]);
    assert_eq!((&framed.context, &framed.objects), (&other.context, &other.objects));
    let handles = Packed::<Handle>::decode(&framed.handles, 100).unwrap();
    assert_eq!(handles.len(), 2);
    assert!(handles.iter().all(|handle| handle.node.0 == 11 && handle.stripe_len == 5_000));

    // An invalid request gives the same error over both protocols.
    let wrong = v1::ExistRequest { context: None, keys: keys(["a"]) };
    let reply = frames.call(FrameKind::Exist, &wrong);
    let response: v1::ExistResponse = reply.message();
    assert_eq!(reply.header.status, Some(ErrorCode::InvalidArgument));
    assert_eq!(response, runtime.block_on(grpc.exist(wrong)).unwrap().into_inner());

    // A removal waits for the node, over both protocols.
    let remove = |names: &[&str]| v1::RemoveRequest { context: context(), keys: keys(names), force: false };
    let removed: v1::OutcomesResponse = frames.call(FrameKind::Remove, &remove(&["a", "b"])).message();
    assert_eq!(codes(&removed), [0, 0]);
    let removed = runtime.block_on(grpc.remove(remove(&["c/d", "e"]))).unwrap().into_inner();
    assert_eq!(codes(&removed), [0, 0]);
    let left: v1::ExistResponse = frames.call(FrameKind::Exist, &exist(&names)).message();
    assert_eq!(present(&left), [false, false, false, false, true, true]);
    assert!(node.is_alive(), "the master rejected a message of the node");
}

#[test]
fn remove_batch_with_missing_keys_waits_for_existing_ones() {
    // In one group keys are handled in order: a missing key comes first and is done immediately.
    let server =
        moontide_master::Server::start(moontide_master::MasterConfig { groups: Some(1), ..config() })
            .unwrap();
    let addresses = server.addresses();
    let runtime = runtime();
    let (mut grpc, _node) = runtime.block_on(async {
        (grpc(addresses.grpc).await, FakeNode::start(addresses.grpc, 5, FakeNodeConfig::default()).await)
    });
    let info = v1::GetClusterInfoRequest { context: context() };
    let info = runtime.block_on(grpc.get_cluster_info(info)).unwrap().into_inner();
    let mut frames = FrameCaller::connect(addresses.frame);
    let names = ["k", "l", "m", "n"];
    let started: v1::PutStartResponse = frames.call(FrameKind::PutStart, &put_start(&names, 100)).message();
    let _: v1::OutcomesResponse =
        frames.call(FrameKind::PutEnd, &put_end(&ids(&info, &names), &started)).message();
    let all = ["w", "k", "x", "l", "y", "m", "z", "n"];
    let remove = v1::RemoveRequest { context: context(), keys: keys(all), force: false };
    let removed: v1::OutcomesResponse = frames.call(FrameKind::Remove, &remove).message();
    let missing = ErrorCode::NotFound as u16;
    assert_eq!(codes(&removed), [missing, 0, missing, 0, missing, 0, missing, 0]);
}

#[test]
fn waiting_remove_does_not_block_later_requests() {
    let server = start();
    let addresses = server.addresses();
    let runtime = runtime();
    let node_config = FakeNodeConfig { executes_commands: false, ..FakeNodeConfig::default() };
    let (mut grpc, _node) = runtime.block_on(async {
        (grpc(addresses.grpc).await, FakeNode::start(addresses.grpc, 5, node_config).await)
    });
    let info = v1::GetClusterInfoRequest { context: context() };
    let info = runtime.block_on(grpc.get_cluster_info(info)).unwrap().into_inner();
    let mut frames = FrameCaller::connect(addresses.frame);
    let started: v1::PutStartResponse = frames.call(FrameKind::PutStart, &put_start(&["k"], 100)).message();
    let _: v1::OutcomesResponse =
        frames.call(FrameKind::PutEnd, &put_end(&ids(&info, &["k"]), &started)).message();

    let mut remove = v1::RemoveRequest { context: context(), keys: keys(["k"]), force: false };
    remove.context.as_mut().unwrap().timeout_ms = 400;
    let started_at = Instant::now();
    let remove = frames.frame(FrameKind::Remove, &remove);
    let lookup = frames.frame(FrameKind::Exist, &exist(&["k"]));
    std::io::Write::write_all(&mut frames.socket, &[remove, lookup].concat()).unwrap();
    let first = frames.read().unwrap();
    assert_eq!(first.header.kind, FrameKind::ExistReply, "the lookup overtakes the removal");
    assert!(started_at.elapsed() < Duration::from_millis(300));
    let second = frames.read().unwrap();
    assert_eq!(second.header.kind, FrameKind::RemoveReply);
    assert_eq!(codes(&second.message()), [ErrorCode::Pending as u16], "the node did not response in time");
    assert!(started_at.elapsed() >= Duration::from_millis(390), "{:?}", started_at.elapsed());
}

#[test]
fn connection_at_inflight_limit_is_not_read() {
    let config = moontide_master::MasterConfig { inflight_per_connection_max: 2, ..config() };
    let server = moontide_master::Server::start(config).unwrap();
    let addresses = server.addresses();
    let runtime = runtime();
    let node_config = FakeNodeConfig { executes_commands: false, ..FakeNodeConfig::default() };
    let (mut grpc, _node) = runtime.block_on(async {
        (grpc(addresses.grpc).await, FakeNode::start(addresses.grpc, 5, node_config).await)
    });
    let info = v1::GetClusterInfoRequest { context: context() };
    let info = runtime.block_on(grpc.get_cluster_info(info)).unwrap().into_inner();
    let mut frames = FrameCaller::connect(addresses.frame);
    let names = ["k", "l"];
    let started: v1::PutStartResponse = frames.call(FrameKind::PutStart, &put_start(&names, 100)).message();
    let _: v1::OutcomesResponse =
        frames.call(FrameKind::PutEnd, &put_end(&ids(&info, &names), &started)).message();
    let mut batch = Vec::new();
    for name in names {
        let mut remove = v1::RemoveRequest { context: context(), keys: keys([name]), force: false };
        remove.context.as_mut().unwrap().timeout_ms = 300;
        batch.extend(frames.frame(FrameKind::Remove, &remove));
    }
    batch.extend(frames.frame(FrameKind::Exist, &exist(&["k"])));
    let started_at = Instant::now();
    std::io::Write::write_all(&mut frames.socket, &batch).unwrap();
    let kinds: Vec<FrameKind> = (0..3).map(|_| frames.read().unwrap().header.kind).collect();
    assert_eq!(kinds[0], FrameKind::RemoveReply, "the third call waits for the in-flight limit");
    assert!(kinds.contains(&FrameKind::ExistReply));
    assert!(started_at.elapsed() >= Duration::from_millis(290));
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = start();
    let mut frames = FrameCaller::connect(server.addresses().frame);
    let mut batch = Vec::new();
    for _ in 0..500 {
        batch.extend(frames.frame(FrameKind::Exist, &exist(&["x", "y"])));
    }
    let mut socket = frames.socket.try_clone().unwrap();
    let writer = std::thread::spawn(move || std::io::Write::write_all(&mut socket, &batch).unwrap());
    for request in 1..=500 {
        let reply = frames.read().unwrap();
        assert_eq!((reply.header.kind, reply.header.request), (FrameKind::ExistReply, request));
    }
    writer.join().unwrap();
    // Large bodies, too: 4,096 keys of 4,000 bytes each are 16 MB.
    let long: Vec<String> = (0..4_096).map(|n| format!("{n:04000}")).collect();
    let request = v1::ExistRequest { context: context(), keys: keys(&long) };
    let reply = frames.call(FrameKind::Exist, &request);
    assert_eq!(reply.header.status, None);
    assert_eq!(reply.message::<v1::ExistResponse>().count, 4_096);
    let remove = v1::RemoveRequest { context: context(), keys: keys(&long), force: false };
    let removed: v1::OutcomesResponse = frames.call(FrameKind::Remove, &remove).message();
    assert!(codes(&removed).iter().all(|&code| code == ErrorCode::NotFound as u16));
}

#[test]
fn unknown_session_is_rejected_as_stale() {
    let server = start();
    let runtime = runtime();
    let status = runtime.block_on(async {
        let channel = channel(server.addresses().grpc).await;
        let mut client = moontide_proto::v1::master_nodes_client::MasterNodesClient::new(channel);
        let heartbeat = v1::Heartbeat { heartbeat_id: 1, ..Default::default() };
        let body = Some(v1::node_message::Body::Heartbeat(heartbeat));
        let message = v1::NodeMessage { session: 4711, sequence: 1, highest_term: 0, body };
        let mut stream = client.session(tokio_stream::iter([message])).await.unwrap().into_inner();
        stream.message().await.unwrap_err()
    });
    assert_eq!(moontide_master::code_of(&status), Some(ErrorCode::StaleSession), "{status:?}");
}

#[test]
fn admin_endpoints_return_state_and_reject_bad_requests() {
    let server = start();
    let addresses = server.addresses();
    let runtime = runtime();
    let (mut grpc, _node) = runtime.block_on(async {
        (
            grpc(addresses.grpc).await,
            FakeNode::start(addresses.grpc, 1 << 60, FakeNodeConfig::default()).await,
        )
    });
    let info = v1::GetClusterInfoRequest { context: context() };
    let info = runtime.block_on(grpc.get_cluster_info(info)).unwrap().into_inner();
    let names = ["plain", "größe", "100%", "comma,comma", "line\nbreak"];
    let started = runtime.block_on(grpc.put_start(put_start(&names, 1_000))).unwrap().into_inner();
    runtime.block_on(grpc.put_end(put_end(&ids(&info, &names), &started))).unwrap();
    let admin = addresses.admin;

    assert_eq!(get(admin, "/health").0, 200);
    assert_eq!(get(admin, "/ready").0, 200);
    assert_eq!(get(admin, "/role").1, r#"{"role":"leader","term":1}"#);

    // The first heartbeat of the node may be on its way.
    let deadline = Instant::now() + Duration::from_secs(30);
    while !get(admin, "/metrics").1.contains("moontide_master_read_disk_hits_total 2") {
        assert!(Instant::now() < deadline, "no heartbeat of the node");
        std::thread::sleep(Duration::from_millis(10));
    }
    let (status, page) = get(admin, "/metrics");
    assert_eq!(status, 200);
    let sample = |name: &str| -> u64 {
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("{name} is not in\n{page}")).parse().unwrap()
    };
    let units = |part: &str| sample(&format!("moontide_master_memory_{part}_bytes"));
    assert_eq!(units("live") + units("reserved") + units("draining") + units("free"), units("capacity"));
    assert_eq!(units("capacity"), (8 << 20) * 512);
    let reads = |part: &str| sample(&format!("moontide_master_read_{part}_total"));
    let hits = reads("memory_hits") + reads("device_hits") + reads("disk_hits");
    assert_eq!(hits + reads("misses"), reads("keys"));
    assert_eq!(reads("disk_hits"), 2, "from the heartbeat of the node");
    assert_eq!(sample("moontide_master_objects"), 5);

    let (status, nodes) = get(admin, "/get_all_nodes");
    assert_eq!(status, 200);
    assert!(nodes.contains("\"pending_commands\""), "{nodes}");
    assert!(nodes.contains("\"node\":\"1000000000000000\""), "{nodes}");
    let (status, segments) = get(admin, "/get_all_segments");
    assert_eq!(status, 200);
    let segments: Value = serde_json::from_str(&segments).unwrap();
    assert_eq!(segments["segments"].as_array().unwrap().len(), 8);
    assert_eq!(segments["segments"][0]["node"], "1000000000000000");
    assert_eq!(segments["segments"][0]["state"], "serving");
    let (_, text) = get(admin, "/get_all_segments?format=text");
    assert_eq!(text.lines().count(), 8);
    assert!(text.lines().any(|line| line == "1000000000000000/0"), "{text}");

    let (_, all) = get(admin, "/get_all_keys");
    let all: Value = serde_json::from_str(&all).unwrap();
    let mut shown: Vec<&str> =
        all["keys"].as_array().unwrap().iter().map(|key| key.as_str().unwrap()).collect();
    shown.sort_unstable();
    assert_eq!(shown, ["100%25", "comma,comma", "größe", "line%0Abreak", "plain"]);
    assert!(all["next_cursor"].is_null());
    // Page by page as lines, with the cursor in a header.
    let (mut lines, mut cursor) = (vec![], String::new());
    loop {
        let path = format!("/get_all_keys?limit=2&cursor={cursor}");
        let (status, head, body) = http(admin, "GET", &path, "Accept: text/plain\r\n", "");
        assert_eq!(status, 200, "{body}");
        lines.extend(body.lines().map(str::to_owned));
        let next = head.lines().find_map(|line| line.strip_prefix("moontide-next-cursor: "));
        match next {
            Some(next) => next.clone_into(&mut cursor),
            None => break,
        }
    }
    lines.sort_unstable();
    assert_eq!(lines, shown);

    for path in [
        "/query_key?key=plain",
        "/query_key?key=line%0Abreak",
        "/query_key?key=100%25",
        "/query_key?key=gr%c3%b6%C3%9Fe",
    ] {
        let (status, body) = get(admin, path);
        assert_eq!(status, 200, "{path}: {body}");
        let object: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(object["len"], 1_000);
        assert_eq!(object["stripes"][0]["node"], "1000000000000000");
    }
    let (status, body) = get(admin, "/query_key?key=nothing");
    let failure: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &failure["name"]), (404, &Value::from("NotFound")));
    assert!(failure["hint"].as_str().is_some_and(|hint| !hint.is_empty()));

    let (_, body) = get(admin, "/batch_query_keys?keys=plain,comma%2Ccomma,nothing");
    let batch: Value = serde_json::from_str(&body).unwrap();
    let ok: Vec<bool> = batch["keys"].as_array().unwrap().iter().map(|key| key["ok"] == true).collect();
    assert_eq!(ok, [true, true, false]);
    let (status, _, posted) =
        http(admin, "POST", "/batch_query_keys", "", r#"["plain","comma,comma","nothing"]"#);
    assert_eq!((status, posted), (200, body));

    for (method, path, body, expected) in [
        ("GET", "/query_key", "", 400),
        ("GET", "/query_key?key=%f", "", 400),
        ("GET", "/query_key?key=", "", 400),
        ("GET", "/query_key?key=a&tenant=no%20spaces", "", 400),
        ("GET", "/get_all_keys?cursor=zz", "", 400),
        ("GET", "/get_all_keys?limit=many", "", 400),
        ("POST", "/batch_query_keys", "{}", 400),
        ("POST", "/segments/x/0/drain", "", 400),
        ("POST", "/segments/1152921504606846976/0/drain", "", 400), // decimal
        ("GET", "/nothing", "", 404),
        ("GET", "/jobs/99", "", 404),
    ] {
        let (status, _, response) = http(admin, method, path, "", body);
        assert_eq!(status, expected, "{method} {path}: {response}");
        let failure: Value = serde_json::from_str(&response).unwrap();
        assert!(failure["code"].is_u64() && failure["message"].is_string(), "{response}");
    }

    let (status, _, body) = http(admin, "POST", "/segments/1000000000000000/0/drain?evict=true", "", "");
    assert_eq!(status, 202, "{body}");
    let job: Value = serde_json::from_str(&body).unwrap();
    let path = format!("/jobs/{}", job["job"].as_str().unwrap());
    eventually("the job is done", || {
        let (status, body) = get(admin, &path);
        assert_eq!(status, 200, "{body}");
        body.contains(r#""state":"done""#)
    });
}

#[test]
fn admin_endpoints_change_objects_tenants_and_memory() {
    let server = start();
    let addresses = server.addresses();
    let runtime = runtime();
    let (mut grpc, _node) = runtime.block_on(async {
        (
            grpc(addresses.grpc).await,
            FakeNode::start(addresses.grpc, 1 << 60, FakeNodeConfig::default()).await,
        )
    });
    let info = v1::GetClusterInfoRequest { context: context() };
    let info = runtime.block_on(grpc.get_cluster_info(info)).unwrap().into_inner();
    let names = ["one", "two", "comma,comma", "doc/1", "doc/2", "log-17"];
    let started = runtime.block_on(grpc.put_start(put_start(&names, 1_000))).unwrap().into_inner();
    runtime.block_on(grpc.put_end(put_end(&ids(&info, &names), &started))).unwrap();
    let admin = addresses.admin;
    let post = |path: &str| {
        let (status, _, body) = http(admin, "POST", path, "", "");
        (
            status,
            serde_json::from_str::<Value>(&body).unwrap_or_else(|error| panic!("{path}: {error}: {body}")),
        )
    };
    let outcomes = |path: &str| -> Vec<bool> {
        let (status, body) = post(path);
        assert_eq!(status, 200, "{path}: {body}");
        body["keys"].as_array().unwrap().iter().map(|key| key["ok"] == true).collect()
    };
    assert_eq!(outcomes("/set_pin?keys=one,comma%2Ccomma,missing&pin=hard"), [true, true, false]);
    assert_eq!(outcomes("/touch?keys=two,missing"), [true, false]);
    assert_eq!(outcomes("/prefetch?keys=two,missing"), [true, false]);
    let (_, object) = get(admin, "/query_key?key=one");
    assert!(object.contains(r#""pin":"hard""#), "{object}");

    let finished = |path: &str, affected: u64, skipped: u64| {
        let (status, body) = post(path);
        assert_eq!(status, 202, "{path}: {body}");
        let job = format!("/jobs/{}", body["job"].as_str().unwrap());
        eventually("the job is done", || {
            let (_, body) = get(admin, &job);
            let body: Value = serde_json::from_str(&body).unwrap();
            let is_done = body["state"] == "done";
            if is_done {
                assert_eq!(
                    (&body["affected"], &body["skipped"]),
                    (&affected.into(), &skipped.into()),
                    "{path}"
                );
            }
            is_done
        });
    };
    finished("/remove_by_prefix?prefix=doc/", 2, 0);
    finished("/remove_by_regex?pattern=%5Elog-%5B0-9%5D%2B%24", 1, 0);
    let (status, evicted) = post("/evict?target_permille=0");
    assert_eq!((status, &evicted["objects"]), (200, &1.into()), "two; the others are pinned");
    finished("/remove_all?tenant=default", 0, 2);
    finished("/remove_all?tenant=default&force=true", 2, 0);

    let (status, _) = post("/tenants/team/quota?bytes_max=1000000");
    assert_eq!(status, 200);
    let (_, tenants) = get(admin, "/get_all_tenants");
    let tenants: Value = serde_json::from_str(&tenants).unwrap();
    let team = tenants["tenants"].as_array().unwrap().iter().find(|tenant| tenant["name"] == "team").unwrap();
    assert_eq!((&team["bytes_max"], &team["objects_max"]), (&1_000_000.into(), &0.into()));

    for path in [
        "/set_pin?keys=one",
        "/set_pin?keys=one&pin=very",
        "/touch",
        "/prefetch?keys=",
        "/remove_by_prefix",
        "/remove_by_prefix?prefix=",
        "/remove_by_regex?pattern=%28",
        "/remove_all",
        "/remove_all?tenant=default&force=maybe",
        "/evict",
        "/evict?target_permille=-1",
        "/tenants/no%20spaces/quota?bytes_max=1",
        "/tenants/team/quota?bytes_max=much",
    ] {
        let (status, failure) = post(path);
        assert_eq!(status, 400, "{path}: {failure}");
        assert!(failure["message"].is_string(), "{path}: {failure}");
    }
    let (status, _) = post("/evict?target_permille=1001");
    assert_eq!(status, 413);

    for (order, drain) in [("drain", true), ("undrain", false)] {
        let (status, body) = post(&format!("/nodes/1000000000000000/{order}"));
        assert_eq!((status, &body["drain"]), (202, &drain.into()));
    }
    assert_eq!(post("/nodes/1000000000000001/drain").0, 404);
    assert_eq!(post("/nodes/x/drain").0, 400);
    assert_eq!(post("/nodes/x/undrain").0, 400);
}

#[test]
fn restart_keeps_identity_and_raises_term() {
    let directory = std::env::temp_dir().join(format!("moontide-master-restart-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    let config = moontide_master::MasterConfig { data_dir: Some(directory.clone()), ..config() };
    let runtime = runtime();
    let mut seen = vec![];
    for term in 1..=2 {
        let server = moontide_master::Server::start(config.clone()).unwrap();
        assert_eq!(server.term().get(), term);
        let second = moontide_master::Server::start(config.clone()).unwrap_err();
        assert!(second.to_string().contains("another master"), "{second}");
        let info = runtime.block_on(async {
            let request = v1::GetClusterInfoRequest { context: context() };
            grpc(server.addresses().grpc).await.get_cluster_info(request).await.unwrap().into_inner()
        });
        assert_eq!(info.context.unwrap().term, term);
        seen.push((info.cluster, info.tenant_id_key));
        server.shutdown();
    }
    assert_eq!(seen[0], seen[1]);
    let _ = std::fs::remove_dir_all(&directory);
}

#[test]
fn bind_error_names_port_and_setting() {
    let server = start();
    let config = moontide_master::MasterConfig { frame_listen: server.addresses().frame, ..config() };
    let error = moontide_master::Server::start(config).unwrap_err().to_string();
    let port = server.addresses().frame.port().to_string();
    assert!(
        error.contains(&port) && error.contains("frame_listen") && error.contains("another process"),
        "{error}"
    );
}

#[test]
fn shutdown_closes_streams_and_connections() {
    let server = start();
    let addresses = server.addresses();
    let runtime = runtime();
    let node = runtime.block_on(FakeNode::start(addresses.grpc, 3, FakeNodeConfig::default()));
    let mut frames = FrameCaller::connect(addresses.frame);
    let started_at = Instant::now();
    server.shutdown();
    assert!(started_at.elapsed() < Duration::from_secs(4), "{:?}", started_at.elapsed());
    assert!(frames.is_closed());
    let status = runtime.block_on(node.end()).unwrap_err();
    assert_eq!(moontide_master::code_of(&status), Some(ErrorCode::Unreachable), "{status:?}");
}
