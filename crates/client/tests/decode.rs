//! The example of the paged cache as two processes on a real cluster: the second restores the blocks of the first.

#[expect(dead_code, reason = "the example has a main function")]
#[path = "../../../examples/rust/decode.rs"]
mod decode;

use std::process::Command;
use std::time::Duration;

use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};

/// Environment variable that passes the master's address to the child process.
const MASTER: &str = "MOONTIDE_DECODE_MASTER";

#[test]
fn second_process_restores_blocks_saved_by_first() {
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
    first.args(["--exact", "child", "--nocapture"]).env(MASTER, &address);
    let output = first.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains("restored 0,"), "{stdout}");

    let again = decode::decode(&address, 24).unwrap();
    // 18 tokens of the prompt: four full blocks.
    assert_eq!(again.restored, 16);
    assert_eq!(again.output.len(), 24);
    let expected = format!("output {:?}", &again.output[..12]);
    assert!(stdout.contains(expected.trim_end_matches(']')), "{stdout} {expected}");
}

/// The first process; does nothing unless the test above started it.
#[test]
fn child() {
    let Ok(master) = std::env::var(MASTER) else { return };
    let result = decode::decode(&master, 12).unwrap();
    println!("restored {}, output {:?}", result.restored, result.output);
}
