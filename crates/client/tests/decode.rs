//! The worked example of the paged cache, as two processes at a real cluster: the second finds what the first has left.

#[expect(dead_code, reason = "the example's own door")]
#[path = "../examples/decode.rs"]
mod decode;

use std::process::Command;
use std::time::Duration;

use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};

/// Says the master's address to this program when it is started again, as another process.
const MASTER: &str = "MOONTIDE_DECODE_MASTER";

#[test]
fn another_process_goes_on_with_what_one_has_left() {
    let free = "127.0.0.1:0".parse().unwrap();
    let config =
        MasterConfig { grpc_listen: free, frame_listen: free, admin_listen: free, ..MasterConfig::default() };
    let master = Server::start(config).unwrap();
    let address = master.addresses().grpc.to_string();
    let config = NodeConfig { master: address.clone(), memory_bytes: 64 << 20, ..NodeConfig::default() };
    let node = Node::start(config).unwrap();
    assert!(node.wait_until_mounted(Duration::from_secs(10)));

    let program = std::env::current_exe().unwrap();
    let mut first = Command::new(program);
    first.args(["--exact", "one_process", "--nocapture"]).env(MASTER, &address);
    let output = first.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("restored 0,"), "{said}");

    let again = decode::decode(&address, 24).unwrap();
    // 18 tokens of the prompt: four full blocks.
    assert_eq!(again.restored, 16);
    assert_eq!(again.answer.len(), 24);
    let twelve = format!("answer {:?}", &again.answer[..12]);
    assert!(said.contains(twelve.trim_end_matches(']')), "{said} {twelve}");
}

/// The first process; does nothing unless it was started by the test above.
#[test]
fn one_process() {
    let Ok(master) = std::env::var(MASTER) else { return };
    let told = decode::decode(&master, 12).unwrap();
    println!("restored {}, answer {:?}", told.restored, told.answer);
}
