//! Child processes that a test controls: a test starts itself again, sends the child commands for a region, and
//! receives the results. Descriptors really cross processes, and every process has a driver of its own.
//!
//! | command | reply |
//! |---|---|
//! | `load` | the driver's version |
//! | `create DEVICE BYTES PEERS SHARING` | length, sharing, domain |
//! | `export` | the region itself, for an `import` of another child |
//! | `import DEVICE`, followed by an export | length, sharing, domain |
//! | `write OFFSET TEXT`, `read OFFSET LEN`, `address` | |
//! | `touch` | result of a forked child that reads the region's first byte by its address: `found BYTE`, or `signal
//! NUMBER` |
//! | `copy FROM TO LEN`, `copy-back FROM TO LEN` | inside the region, as if one end were another device's memory |
//! | `synchronize`, `concurrent-copies THREADS ROUNDS` | waits for kernels; threads that copy at the same time |
//! | `close`, `drop` | |
//! | `fork` | result of a forked child that uses the region |
//! | `set-device DEVICE`, `current` | the device that the caller selected for itself |
//! | `world RANK RANKS PATH BYTES SHARING TIMEOUT_MS`, `leave`, `drop-world` | a world, and a device world beside it
//! |
//! | `put RANK OFFSET TEXT`, `get RANK OFFSET LEN`, `bases`, `barrier` | in these worlds |
//! | `register BYTES ACCESS` | host memory for devices: `read`, `write`; `view`, `view-write` for a read-only mapping
//! |
//! | `register-part SKIP BYTES`, `unregister` | a registration of a part of a page; drops the registration |
//! | `host-write OFFSET TEXT`, `host-read OFFSET LEN` | the host's access to that memory |
//! | `copy-from-host FROM TO LEN`, `copy-to-host FROM TO LEN` | copies from that memory to the region, and back |
//! | `alias-read OFFSET LEN` | bytes at the registration's device address, if that is an address of the host |
//! | `break` | the fake devices stop permanently |
//! | `fds`, `leaks`, `devices` | open descriptors; resources of the fake driver that are left; devices of the driver
//! |

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test file uses its own part")]

use std::collections::HashMap;
use std::ffi::{CStr, c_int};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libloading::os::unix::Library;
use moontide_heap::{HugePages, Protection, Region};
use moontide_symmetric::{
    AtomicDomain, DeviceConfig, DeviceError, DeviceExport, DeviceRegion, DeviceWorld, DeviceWorldConfig,
    Driver, HandleType, HostAccess, HostRegistration, Rank, ShareableHandle, Vendor, World, WorldConfig,
    WorldShape,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Environment variable that makes a process a child, and its kind of memory: `memfd`, `cuda` or `hip`.
const ROLE: &str = "MOONTIDE_TEST_CHILD";

/// Maximum time for which ranks wait for each other.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A test with its name.
pub type Test = (&'static str, fn());

/// Runs the tests, or the commands of a test if this process is a child.
pub fn main(tests: &[Test], ignored: &[&str], run: fn(&[Test], &[&str], &[String]) -> ExitCode) -> ExitCode {
    match std::env::var(ROLE) {
        Ok(role) => perform(&role),
        Err(_) => run(tests, ignored, &std::env::args().skip(1).collect::<Vec<_>>()),
    }
}

/// Returns the path of the fake driver, which cargo built beside the tests.
pub fn fake() -> PathBuf {
    let mut folder = std::env::current_exe().expect("this program");
    folder.pop();
    let path = folder.join("libmoontide_fakedriver.so");
    assert!(path.exists(), "{} does not exist; build the tests with cargo", path.display());
    path
}

/// A temporary file, removed with the value.
#[derive(Debug)]
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Scratch(std::env::temp_dir().join(format!("moontide-device-{}-{number}-{name}", std::process::id())))
    }

    pub fn text(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap_or_default()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Kind of memory that a child uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    Memfd,
    Device(Vendor),
}

/// Configuration of a child process.
#[derive(Clone, Debug)]
pub struct ChildDriver {
    pub kind: MemoryKind,
    env: HashMap<&'static str, String>,
}

impl ChildDriver {
    /// Uses the machine's own driver.
    pub fn real(kind: MemoryKind) -> ChildDriver {
        ChildDriver { kind, env: HashMap::new() }
    }

    /// Uses the fake driver, whose devices have memory that the host cannot access.
    pub fn fake(vendor: Vendor) -> ChildDriver {
        let library = fake();
        let driver = ChildDriver::real(MemoryKind::Device(vendor));
        driver.with(vendor.env(), library.to_str().expect("a path in UTF-8")).having("")
    }

    pub fn with(mut self, name: &'static str, value: &str) -> ChildDriver {
        self.env.insert(name, value.to_owned());
        self
    }

    /// Sets the properties of the fake devices; a test that needs memory that the host can access sets `blind=0`.
    pub fn having(self, settings: &str) -> ChildDriver {
        self.with("MOONTIDE_FAKE_DRIVER", &format!("blind=1,{settings}"))
    }

    pub fn failing(self, fault: &str) -> ChildDriver {
        self.with("MOONTIDE_FAKE_DRIVER_FAIL", fault)
    }

    pub fn logging(self, log: &Scratch) -> ChildDriver {
        self.with("MOONTIDE_FAKE_DRIVER_LOG", log.0.to_str().expect("a path in UTF-8"))
    }

    pub fn start(&self) -> ChildProcess {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let role = match self.kind {
            MemoryKind::Memfd => "memfd",
            MemoryKind::Device(Vendor::Cuda) => "cuda",
            MemoryKind::Device(Vendor::Hip) => "hip",
        };
        let child = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, role)
            .envs(&self.env)
            .stdin(Stdio::from(theirs))
            .spawn()
            .unwrap();
        ChildProcess { socket: ours, child }
    }

    /// Starts a child and loads its driver.
    pub fn loaded(&self) -> ChildProcess {
        let child = self.start();
        child.ok("load");
        child
    }
}

/// A child process that executes commands. Killed when the value is dropped, unless it was finished.
#[derive(Debug)]
pub struct ChildProcess {
    socket: OwnedFd,
    child: Child,
}

impl ChildProcess {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn ask(&self, command: &str) -> Result<String, String> {
        send(&self.socket, command);
        self.reply()
    }

    pub fn reply(&self) -> Result<String, String> {
        let reply = receive(&self.socket).expect("the child is running");
        match reply.split_once(' ') {
            Some(("ok", rest)) => Ok(rest.to_owned()),
            Some(("error", rest)) => Err(rest.to_owned()),
            _ => panic!("{reply}"),
        }
    }

    #[track_caller]
    pub fn ok(&self, command: &str) -> String {
        self.ask(command).unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// Sends a command without waiting for the reply, which [`ChildProcess::reply`] returns.
    pub fn send(&self, command: &str) {
        send(&self.socket, command);
    }

    #[track_caller]
    pub fn export(&self) -> DeviceExport {
        send(&self.socket, "export");
        DeviceExport::receive(&self.socket).unwrap()
    }

    pub fn import(&self, device: u32, export: DeviceExport) -> Result<String, String> {
        send(&self.socket, &format!("import {device}"));
        export.send(&self.socket).unwrap();
        self.reply()
    }

    /// Kills the child with SIGKILL: none of its own cleanup runs.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Lets the child exit normally, so that the driver reports the resources that are left.
    pub fn finish(mut self) {
        send(&self.socket, "exit");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn send(socket: impl AsFd, message: &str) {
    rustix::net::send(socket, message.as_bytes(), SendFlags::NOSIGNAL).unwrap();
}

/// Returns `None` if the peer has closed the socket.
fn receive(socket: impl AsFd) -> Option<String> {
    let mut bytes = vec![0; 64 << 10];
    let (len, _) = rustix::net::recv(socket, &mut bytes[..], RecvFlags::empty()).ok()?;
    bytes.truncate(len);
    (len > 0).then(|| String::from_utf8(bytes).unwrap())
}

/// A region of any kind.
enum HeldRegion {
    Memfd(Region),
    Device(DeviceRegion),
}

/// A registration and its memory, which is unmapped after it.
struct RegisteredMemory {
    registration: HostRegistration,
    /// Mapping that is registered, if it is another one than `memory`.
    view: Option<Region>,
    memory: Region,
}

type ChildReply = Result<String, Box<dyn std::error::Error>>;

struct ChildScript {
    vendor: Option<Vendor>,
    driver: Option<Driver>,
    registered: Option<RegisteredMemory>,
    held: Option<HeldRegion>,
    worlds: Option<(World, DeviceWorld)>,
}

fn perform(role: &str) -> ExitCode {
    let vendor = match role {
        "cuda" => Some(Vendor::Cuda),
        "hip" => Some(Vendor::Hip),
        _ => None,
    };
    let mut script = ChildScript { vendor, driver: None, registered: None, held: None, worlds: None };
    let socket = std::io::stdin();
    while let Some(message) = receive(&socket) {
        let words: Vec<&str> = message.split(' ').collect();
        let result = match words[..] {
            ["exit"] => break,
            ["export"] => match script.export().and_then(|export| Ok(export.send(&socket)?)) {
                Ok(()) => continue,
                Err(error) => Err(error),
            },
            ["import", device] => {
                let export = DeviceExport::receive(&socket);
                export.map_err(Into::into).and_then(|export| script.import(device.parse()?, export))
            }
            _ => script.execute(&words),
        };
        match result {
            Ok(reply) => send(&socket, &format!("ok {reply}")),
            Err(error) => send(&socket, &format!("error {error}")),
        }
    }
    drop(script);
    ExitCode::SUCCESS
}

impl ChildScript {
    fn driver(&self) -> Driver {
        self.driver.expect("`load` comes first")
    }

    fn execute(&mut self, words: &[&str]) -> ChildReply {
        match *words {
            ["load"] => match self.vendor {
                None => Ok(String::new()),
                Some(vendor) => {
                    let driver = Driver::load(vendor, None)?;
                    self.driver = Some(driver);
                    Ok(driver.version())
                }
            },
            ["create", device, bytes, peers, sharing] => {
                let (device, bytes) = (device.parse()?, bytes.parse()?);
                let peers: Vec<u32> = peers.split(',').filter_map(|peer| peer.parse().ok()).collect();
                let sharing = match sharing {
                    "handle" => Some(HandleType::Ipc),
                    "descriptor" => Some(HandleType::PosixFd),
                    _ => None,
                };
                self.held = Some(match self.vendor {
                    None => HeldRegion::Memfd(Region::create(
                        "child",
                        bytes,
                        HugePages::Auto,
                        Protection::AllWrite,
                    )?),
                    Some(_) => {
                        let config = DeviceConfig { device, bytes, peers: &peers, sharing };
                        HeldRegion::Device(DeviceRegion::create(self.driver(), &config)?)
                    }
                });
                self.describe()
            }
            ["write", offset, text] => self.write(offset.parse()?, text.as_bytes()),
            ["read", offset, len] => {
                let mut bytes = vec![0; len.parse()?];
                self.read(offset.parse()?, &mut bytes)?;
                Ok(String::from_utf8(bytes)?)
            }
            ["address"] => match self.held.as_ref().ok_or("no region")? {
                HeldRegion::Memfd(region) => Ok(region.base().addr().to_string()),
                HeldRegion::Device(region) => Ok(region.address().to_string()),
            },
            ["touch"] => Ok(touch(self.device_region()?.address() as usize)),
            ["copy", from, to, len] => {
                let (region, from) = (self.device_region()?, from.parse::<u64>()?);
                // SAFETY: inside the region, without overlap; the children do not run concurrently.
                unsafe {
                    region.write_from_device(to.parse()?, region.address() + from, len.parse()?)?;
                }
                Ok(String::new())
            }
            ["copy-back", from, to, len] => {
                let (region, to) = (self.device_region()?, to.parse::<u64>()?);
                // SAFETY: as above.
                unsafe { region.read_to_device(from.parse()?, region.address() + to, len.parse()?)? };
                Ok(String::new())
            }
            ["register", bytes, access] => self.register(bytes.parse()?, access),
            ["register-part", skip, bytes] => {
                let memory = Region::create("registered", 8192, HugePages::Auto, Protection::AllWrite)?;
                let (skip, bytes): (usize, usize) = (skip.parse()?, bytes.parse()?);
                assert!(skip + bytes <= memory.len() as usize);
                // SAFETY: a range of memory that outlives the registration.
                unsafe {
                    HostRegistration::open(
                        self.driver(),
                        0,
                        memory.base().add(skip),
                        bytes,
                        HostAccess::Read,
                    )?;
                }
                Ok(String::new())
            }
            ["unregister"] => {
                self.registered = None;
                Ok(String::new())
            }
            ["host-write", offset, text] => {
                let offset: usize = offset.parse()?;
                let memory = &self.registered()?.memory;
                assert!(offset + text.len() <= memory.len() as usize);
                // SAFETY: inside the memory; the children do not run concurrently, and the devices run only commands.
                unsafe {
                    memory.base().add(offset).copy_from(NonNull::from(text.as_bytes()).cast(), text.len())
                };
                Ok(String::new())
            }
            ["host-read", offset, len] => {
                let at = self.registered()?.memory.base().as_ptr().expose_provenance();
                self.read_host(at, offset.parse()?, len.parse()?)
            }
            ["alias-read", offset, len] => {
                let at = self.registered()?.registration.address() as usize;
                self.read_host(at, offset.parse()?, len.parse()?)
            }
            ["copy-from-host", from, to, len] => {
                let source = self.registered()?.registration.address() + from.parse::<u64>()?;
                // SAFETY: a range of the registration; the children do not run concurrently.
                unsafe { self.device_region()?.write_from_device(to.parse()?, source, len.parse()?)? };
                Ok(String::new())
            }
            ["copy-to-host", from, to, len] => {
                let target = self.registered()?.registration.address() + to.parse::<u64>()?;
                // SAFETY: as above.
                unsafe { self.device_region()?.read_to_device(from.parse()?, target, len.parse()?)? };
                Ok(String::new())
            }
            ["synchronize"] => {
                self.device_region()?.synchronize()?;
                Ok(String::new())
            }
            ["concurrent-copies", threads, rounds] => {
                concurrent_copies(self.device_region()?, threads.parse()?, rounds.parse()?);
                Ok(String::new())
            }
            ["break"] => {
                // SAFETY: the fake driver's own function.
                unsafe { library()?.get::<unsafe extern "C" fn()>(b"moontide_fake_break")?() };
                Ok(String::new())
            }
            ["close"] => {
                if let Some(RegisteredMemory { registration, .. }) = self.registered.take() {
                    registration.close()?;
                }
                if let Some(HeldRegion::Device(region)) = self.held.take() {
                    region.close()?;
                }
                Ok(String::new())
            }
            ["drop"] => {
                self.registered = None;
                self.held = None;
                Ok(String::new())
            }
            ["world", rank, ranks, path, bytes, sharing, timeout_ms] => {
                let world = WorldConfig {
                    path: path.into(),
                    rank: Rank(rank.parse()?),
                    shape: WorldShape { ranks: ranks.parse()?, bytes: 4096 },
                    huge: HugePages::Auto,
                    timeout: TIMEOUT,
                };
                let sharing = (sharing == "handle").then_some(HandleType::Ipc);
                let region =
                    DeviceConfig { device: rank.parse()?, bytes: bytes.parse()?, peers: &[], sharing };
                self.worlds = Some(self.join(&world, region, Duration::from_millis(timeout_ms.parse()?))?);
                Ok(String::new())
            }
            ["drop-world"] => {
                self.worlds = None;
                Ok(String::new())
            }
            ["leave"] => {
                let (world, device) = self.worlds.take().ok_or("no world")?;
                device.leave(&world, TIMEOUT)?;
                Ok(String::new())
            }
            ["put", rank, offset, text] => {
                self.region_of(rank)?.write(offset.parse()?, text.as_bytes())?;
                Ok(String::new())
            }
            ["get", rank, offset, len] => {
                let mut bytes = vec![0; len.parse()?];
                self.region_of(rank)?.read(offset.parse()?, &mut bytes)?;
                Ok(String::from_utf8(bytes)?)
            }
            ["bases"] => {
                let (_, device) = self.worlds.as_ref().ok_or("no world")?;
                let own = device.bases()[device.rank().index()];
                for (rank, base) in (0..).zip(device.bases()) {
                    assert_eq!(device.translate(own + 77, Rank(rank)), base + 77);
                }
                Ok(format!("{:?}", device.bases()))
            }
            ["barrier"] => Ok(format!("{:?}", self.worlds.as_ref().ok_or("no world")?.0.barrier(TIMEOUT)?)),
            ["fork"] => self.fork(),
            ["set-device", device] => self.set_device(device.parse()?),
            ["current"] => self.current(),
            ["fds"] => Ok(std::fs::read_dir("/proc/self/fd")?.count().to_string()),
            ["leaks"] => Ok(leaks()),
            ["devices"] => Ok(format!("{:?}", self.driver().devices()?)),
            _ => Err(format!("{words:?}").into()),
        }
    }

    fn join(
        &self,
        config: &WorldConfig,
        region: DeviceConfig<'_>,
        timeout: Duration,
    ) -> Result<(World, DeviceWorld), Box<dyn std::error::Error>> {
        // SAFETY: the children run one at a time, as the test commands them.
        let world = unsafe { World::join(config) }?;
        let config = DeviceWorldConfig { path: &config.path, region, timeout };
        // SAFETY: as above.
        let device = unsafe { DeviceWorld::join(&world, self.driver(), &config) }?;
        Ok((world, device))
    }

    fn region_of(&self, rank: &str) -> Result<&DeviceRegion, Box<dyn std::error::Error>> {
        Ok(self.worlds.as_ref().ok_or("no world")?.1.region(Rank(rank.parse()?)))
    }

    fn register(&mut self, bytes: u64, access: &str) -> ChildReply {
        let memory = Region::create("registered", bytes, HugePages::Auto, Protection::OwnerWrites)?;
        let view = match access {
            "view" | "view-write" => {
                // SAFETY: maps it read-only, in the same process.
                let fd = unsafe { memory.fd() }.try_clone_to_owned()?;
                Some(Region::import(fd, memory.len(), Protection::OwnerWrites)?)
            }
            _ => None,
        };
        let mapping = view.as_ref().unwrap_or(&memory);
        let (at, len) = (mapping.base(), mapping.len() as usize);
        let access = if access.ends_with("write") { HostAccess::ReadWrite } else { HostAccess::Read };
        // SAFETY: the memory lives as long as the registration, beside which it is stored.
        let registration = unsafe {
            match &self.worlds {
                Some((_, world)) => world.window(at, len, access)?,
                None => HostRegistration::open(self.driver(), 0, at, len, access)?,
            }
        };
        self.registered = Some(RegisteredMemory { registration, view, memory });
        Ok(String::new())
    }

    fn registered(&self) -> Result<&RegisteredMemory, Box<dyn std::error::Error>> {
        self.registered.as_ref().ok_or_else(|| "no registered memory".into())
    }

    /// Reads bytes of the registered memory at an address of the host.
    fn read_host(&self, at: usize, offset: usize, len: usize) -> ChildReply {
        assert!(offset + len <= self.registered()?.registration.len());
        let at = std::ptr::with_exposed_provenance::<u8>(at + offset);
        // SAFETY: inside the registered memory, by either of its addresses; the children do not run concurrently.
        Ok(String::from_utf8(unsafe { std::slice::from_raw_parts(at, len) }.to_vec())?)
    }

    fn device_region(&self) -> Result<&DeviceRegion, Box<dyn std::error::Error>> {
        match &self.held {
            Some(HeldRegion::Device(region)) => Ok(region),
            _ => Err("no device region".into()),
        }
    }

    fn describe(&self) -> ChildReply {
        Ok(match self.held.as_ref().ok_or("no region")? {
            HeldRegion::Memfd(region) => {
                format!("{} PosixFd {:?}", region.len(), AtomicDomain::of_shared_memory(region))
            }
            HeldRegion::Device(region) => {
                format!("{} {:?} {:?}", region.len(), region.sharing(), region.atomic_domain())
            }
        })
    }

    fn export(&self) -> Result<DeviceExport, Box<dyn std::error::Error>> {
        match self.held.as_ref().ok_or("no region")? {
            // SAFETY: the children run one at a time, as the test commands them.
            HeldRegion::Device(region) => Ok(unsafe { region.export() }?),
            HeldRegion::Memfd(region) => {
                // SAFETY: as above.
                let fd = unsafe { region.fd() }.try_clone_to_owned()?;
                // Only carries the descriptor; the vendor has no meaning.
                let (vendor, domain, share) =
                    (Vendor::Cuda, AtomicDomain::Device, ShareableHandle::Descriptor(fd));
                Ok(DeviceExport { vendor, len: region.len(), domain, share })
            }
        }
    }

    fn import(&mut self, device: u32, export: DeviceExport) -> ChildReply {
        self.held = Some(match (self.vendor, export.share) {
            (None, ShareableHandle::Descriptor(fd)) => {
                HeldRegion::Memfd(Region::import(fd, export.len, Protection::AllWrite)?)
            }
            (_, share) => {
                let export = DeviceExport { share, ..export };
                HeldRegion::Device(DeviceRegion::import(self.driver(), device, export)?)
            }
        });
        self.describe()
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> ChildReply {
        match self.held.as_ref().ok_or("no region")? {
            HeldRegion::Device(region) => region.write(offset, bytes)?,
            HeldRegion::Memfd(region) => {
                assert!(offset + bytes.len() as u64 <= region.len());
                // SAFETY: inside the region; the children do not run concurrently.
                unsafe {
                    let target = region.base().add(offset as usize).as_ptr();
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
                }
            }
        }
        Ok(String::new())
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Box<dyn std::error::Error>> {
        match self.held.as_ref().ok_or("no region")? {
            HeldRegion::Device(region) => region.read(offset, bytes)?,
            HeldRegion::Memfd(region) => {
                assert!(offset + bytes.len() as u64 <= region.len());
                // SAFETY: inside the region; the children do not run concurrently.
                unsafe {
                    let source = region.base().add(offset as usize).as_ptr();
                    std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len());
                }
            }
        }
        Ok(())
    }

    /// Checks in a forked child that the region cannot be used, and that dropping it does not affect the parent.
    fn fork(&mut self) -> ChildReply {
        // SAFETY: the child uses nothing that a driver's thread could have left locked, and ends with `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let is_refused = match &self.held {
                Some(HeldRegion::Device(region)) => {
                    matches!(region.read(0, &mut [0]), Err(DeviceError::Forked))
                        && matches!(Driver::load(self.driver().vendor(), None), Err(DeviceError::Forked))
                        && matches!(self.driver().devices(), Err(DeviceError::Forked))
                }
                _ => true,
            };
            (self.registered, self.held) = (None, None);
            // SAFETY: skips the parent's exit handlers.
            unsafe { libc::_exit(if is_refused { 7 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: a valid pointer.
        unsafe { libc::waitpid(pid, &mut status, 0) };
        match libc::WEXITSTATUS(status) {
            7 if libc::WIFEXITED(status) => Ok("refused".to_owned()),
            _ => Err(format!("the forked child ended with status {status:#x}").into()),
        }
    }

    /// Selects a device, as a caller that launches kernels of its own.
    fn set_device(&self, device: c_int) -> ChildReply {
        let library = library()?;
        let code = match self.driver().vendor() {
            // SAFETY: with the types of the fake driver's functions.
            Vendor::Cuda => unsafe {
                let mut context = 0usize;
                let retain = library
                    .get::<unsafe extern "C" fn(*mut usize, c_int) -> c_int>(b"cuDevicePrimaryCtxRetain")?;
                let set = library.get::<unsafe extern "C" fn(usize) -> c_int>(b"cuCtxSetCurrent")?;
                retain(&mut context, device) | set(context)
            },
            // SAFETY: as above.
            Vendor::Hip => unsafe {
                library.get::<unsafe extern "C" fn(c_int) -> c_int>(b"hipSetDevice")?(device)
            },
        };
        Ok(code.to_string())
    }

    fn current(&self) -> ChildReply {
        let (library, mut current) = (library()?, 0usize);
        let name = if self.driver().vendor() == Vendor::Cuda { "cuCtxGetCurrent" } else { "hipGetDevice" };
        // SAFETY: writes a pointer or, on a little-endian machine, its lower half.
        unsafe { library.get::<unsafe extern "C" fn(*mut usize) -> c_int>(name.as_bytes())?(&mut current) };
        Ok(current.to_string())
    }
}

/// Returns the result of a read by the host at an address.
fn touch(address: usize) -> String {
    // SAFETY: the child reads a byte and ends with `_exit`: it uses nothing that another thread could have left
    // locked.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let at = std::ptr::with_exposed_provenance::<u8>(address);
        // SAFETY: on the fake driver, a byte that is mapped and initialized, or one whose page denies access. The
        // latter ends this child, which is the expected result; a core dump of it would be useless.
        unsafe {
            libc::prctl(libc::PR_SET_DUMPABLE, 0);
            libc::_exit(c_int::from(at.read_volatile()));
        }
    }
    let mut status = 0;
    // SAFETY: a valid pointer.
    unsafe { libc::waitpid(pid, &mut status, 0) };
    match libc::WIFSIGNALED(status) {
        true => format!("signal {}", libc::WTERMSIG(status)),
        false => format!("found {}", libc::WEXITSTATUS(status)),
    }
}

/// Every thread writes, copies and reads bytes of its own, all through one region.
fn concurrent_copies(region: &DeviceRegion, threads: u64, rounds: u64) {
    const BYTES: u64 = 1024;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let [source, target] = [2 * thread * BYTES, (2 * thread + 1) * BYTES];
                for round in 0..rounds {
                    let (written, mut found) =
                        ([(thread * 31 + round) as u8; BYTES as usize], [0; BYTES as usize]);
                    region.write(source, &written).unwrap();
                    // SAFETY: two ranges of the region that no other thread uses.
                    unsafe { region.write_from_device(target, region.address() + source, BYTES) }.unwrap();
                    region.read(target, &mut found).unwrap();
                    assert!(written == found, "thread {thread}, round {round}");
                }
            });
        }
    });
}

fn library() -> Result<Library, libloading::Error> {
    // SAFETY: the fake driver of this workspace.
    let library = unsafe { Library::new(fake()) }?;
    // SAFETY: a second reference, so that dropping the first does not unload it.
    std::mem::forget(unsafe { Library::new(fake()) }?);
    Ok(library)
}

fn leaks() -> String {
    let (library, mut text) = (library().unwrap(), [0; 512]);
    type Leaks = unsafe extern "C" fn(*mut std::ffi::c_char, usize);
    // SAFETY: the fake driver's own function, with a buffer of that length.
    unsafe {
        library.get::<Leaks>(b"moontide_fake_leaks").unwrap()(text.as_mut_ptr(), text.len());
        CStr::from_ptr(text.as_ptr()).to_str().unwrap().to_owned()
    }
}
