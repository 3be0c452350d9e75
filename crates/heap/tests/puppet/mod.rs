//! Processes on strings: a test starts itself again, tells the child by messages what to do with a region, and hears how it
//! went. Descriptors really cross processes, and every process has a driver of its own.
//!
//! | message | answer |
//! |---|---|
//! | `load` | the driver's version |
//! | `create DEVICE BYTES PEERS SHARING` | length, sharing, domain |
//! | `offer` | the region itself, for somebody else's `import` |
//! | `import DEVICE`, followed by an offer | length, sharing, domain |
//! | `write OFFSET TEXT`, `read OFFSET LEN`, `address` | |
//! | `touch` | how a forked child ends that reads the region's first byte by its address: `found BYTE`, or `signal NUMBER` |
//! | `copy FROM TO LEN`, `copy-back FROM TO LEN` | inside the region, as if one end were another device's memory |
//! | `settle`, `crowd THREADS ROUNDS` | waits for kernels; threads that copy at the same time |
//! | `close`, `drop` | |
//! | `fork` | what a forked child says of the region |
//! | `adopt DEVICE`, `current` | the device that the caller had chosen for itself |
//! | `world RANK RANKS PATH BYTES SHARING TIMEOUT_MS`, `leave`, `abandon` | a world, and one of devices beside it |
//! | `put RANK OFFSET TEXT`, `get RANK OFFSET LEN`, `bases`, `meet` | in it |
//! | `window BYTES ACCESS` | memory of the host for devices: `read`, `write`; `view`, `view-write` if it is mapped to be read |
//! | `slit SKIP BYTES`, `shut` | a window on a part of a page; lets go of the window |
//! | `show OFFSET TEXT`, `look OFFSET LEN` | what the host writes and finds there |
//! | `take FROM TO LEN`, `give FROM TO LEN` | copies from the window to the region, and back |
//! | `through OFFSET LEN` | what is at the window's address, where a device's address is one of the host |
//! | `break` | the fake devices stop for good |
//! | `fds`, `left`, `devices` | open descriptors; what the fake driver still holds; what the driver has |

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
use moontide_heap::{
    AtomicDomain, DeviceConfig, DeviceError, DeviceOffer, DeviceRegion, DeviceWorld, DeviceWorldConfig,
    Driver, HostWindow, HugePages, Protection, Rank, Region, Share, Sharing, Vendor, WindowAccess, World,
    WorldConfig, WorldShape,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Says that a process is a puppet, and what it plays on: `memfd`, `cuda` or `hip`.
const ROLE: &str = "MOONTIDE_PUPPET";

/// Longest that ranks wait for each other.
const PATIENCE: Duration = Duration::from_secs(30);

/// A test with its name.
pub type Test = (&'static str, fn());

/// Runs the tests, or what a test told this process to do.
pub fn main(tests: &[Test], run: fn(&[Test], &[String]) -> ExitCode) -> ExitCode {
    match std::env::var(ROLE) {
        Ok(role) => perform(&role),
        Err(_) => run(tests, &std::env::args().skip(1).collect::<Vec<_>>()),
    }
}

/// The fake driver, which cargo built beside the tests.
pub fn fake() -> PathBuf {
    let mut folder = std::env::current_exe().expect("this program");
    folder.pop();
    let path = folder.join("libmoontide_fakedriver.so");
    assert!(path.exists(), "{} is not there; build the tests with cargo", path.display());
    path
}

/// A file that is gone with the value.
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

/// What a puppet plays on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Memfd,
    Device(Vendor),
}

/// How to start one.
#[derive(Clone, Debug)]
pub struct Puppeteer {
    pub stage: Stage,
    env: HashMap<&'static str, String>,
}

impl Puppeteer {
    /// On whatever driver the machine has.
    pub fn real(stage: Stage) -> Puppeteer {
        Puppeteer { stage, env: HashMap::new() }
    }

    /// On the fake driver, whose devices have memory that processors cannot touch.
    pub fn fake(vendor: Vendor) -> Puppeteer {
        let library = fake();
        let stage = Puppeteer::real(Stage::Device(vendor));
        stage.with(vendor.env(), library.to_str().expect("a path in UTF-8")).having("")
    }

    pub fn with(mut self, name: &'static str, value: &str) -> Puppeteer {
        self.env.insert(name, value.to_owned());
        self
    }

    /// With such devices; a test that wants memory that processors can touch says `blind=0`.
    pub fn having(self, settings: &str) -> Puppeteer {
        self.with("MOONTIDE_FAKE_DRIVER", &format!("blind=1,{settings}"))
    }

    pub fn failing(self, plan: &str) -> Puppeteer {
        self.with("MOONTIDE_FAKE_DRIVER_FAIL", plan)
    }

    pub fn logging(self, log: &Scratch) -> Puppeteer {
        self.with("MOONTIDE_FAKE_DRIVER_LOG", log.0.to_str().expect("a path in UTF-8"))
    }

    pub fn start(&self) -> Puppet {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let role = match self.stage {
            Stage::Memfd => "memfd",
            Stage::Device(Vendor::Cuda) => "cuda",
            Stage::Device(Vendor::Hip) => "hip",
        };
        let child = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, role)
            .envs(&self.env)
            .stdin(Stdio::from(theirs))
            .spawn()
            .unwrap();
        Puppet { socket: ours, child }
    }

    /// One that has loaded its driver.
    pub fn loaded(&self) -> Puppet {
        let puppet = self.start();
        puppet.ok("load");
        puppet
    }
}

/// A process that does what it is told. Killed with the value, unless it was let go.
#[derive(Debug)]
pub struct Puppet {
    socket: OwnedFd,
    child: Child,
}

impl Puppet {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn ask(&self, message: &str) -> Result<String, String> {
        say(&self.socket, message);
        self.heard()
    }

    pub fn heard(&self) -> Result<String, String> {
        let answer = hear(&self.socket).expect("the puppet lives");
        match answer.split_once(' ') {
            Some(("ok", rest)) => Ok(rest.to_owned()),
            Some(("error", rest)) => Err(rest.to_owned()),
            _ => panic!("{answer}"),
        }
    }

    #[track_caller]
    pub fn ok(&self, message: &str) -> String {
        self.ask(message).unwrap_or_else(|error| panic!("{message}: {error}"))
    }

    /// Tells without waiting for the answer, which is [`Puppet::heard`].
    pub fn tell(&self, message: &str) {
        say(&self.socket, message);
    }

    #[track_caller]
    pub fn offer(&self) -> DeviceOffer {
        say(&self.socket, "offer");
        DeviceOffer::receive(&self.socket).unwrap()
    }

    pub fn import(&self, device: u32, offer: DeviceOffer) -> Result<String, String> {
        say(&self.socket, &format!("import {device}"));
        offer.send(&self.socket).unwrap();
        self.heard()
    }

    /// Kills it, as the machine would: nothing of its own runs any more.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Lets it end by itself, so that the driver reports what is left.
    pub fn finish(mut self) {
        say(&self.socket, "end");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(socket: impl AsFd, message: &str) {
    rustix::net::send(socket, message.as_bytes(), SendFlags::NOSIGNAL).unwrap();
}

/// None if the other side is gone.
fn hear(socket: impl AsFd) -> Option<String> {
    let mut bytes = vec![0; 64 << 10];
    let (len, _) = rustix::net::recv(socket, &mut bytes[..], RecvFlags::empty()).ok()?;
    bytes.truncate(len);
    (len > 0).then(|| String::from_utf8(bytes).unwrap())
}

/// A region of any kind.
enum Held {
    Memfd(Region),
    Device(DeviceRegion),
}

/// A window with its memory, which ends after it.
struct Opening {
    window: HostWindow,
    /// What the window shows, if that is another mapping of the memory.
    view: Option<Region>,
    memory: Region,
}

type Told = Result<String, Box<dyn std::error::Error>>;

struct Play {
    vendor: Option<Vendor>,
    driver: Option<Driver>,
    opening: Option<Opening>,
    held: Option<Held>,
    worlds: Option<(World, DeviceWorld)>,
}

fn perform(role: &str) -> ExitCode {
    let vendor = match role {
        "cuda" => Some(Vendor::Cuda),
        "hip" => Some(Vendor::Hip),
        _ => None,
    };
    let mut play = Play { vendor, driver: None, opening: None, held: None, worlds: None };
    let socket = std::io::stdin();
    while let Some(message) = hear(&socket) {
        let words: Vec<&str> = message.split(' ').collect();
        let told = match words[..] {
            ["end"] => break,
            ["offer"] => match play.offer().and_then(|offer| Ok(offer.send(&socket)?)) {
                Ok(()) => continue,
                Err(error) => Err(error),
            },
            ["import", device] => {
                let offer = DeviceOffer::receive(&socket);
                offer.map_err(Into::into).and_then(|offer| play.import(device.parse()?, offer))
            }
            _ => play.obey(&words),
        };
        match told {
            Ok(answer) => say(&socket, &format!("ok {answer}")),
            Err(error) => say(&socket, &format!("error {error}")),
        }
    }
    drop(play);
    ExitCode::SUCCESS
}

impl Play {
    fn driver(&self) -> Driver {
        self.driver.expect("`load` comes first")
    }

    fn obey(&mut self, words: &[&str]) -> Told {
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
                    "handle" => Some(Sharing::Handle),
                    "descriptor" => Some(Sharing::Descriptor),
                    _ => None,
                };
                self.held = Some(match self.vendor {
                    None => Held::Memfd(Region::create(
                        "puppet",
                        bytes,
                        HugePages::IfAllowed,
                        Protection::AllWrite,
                    )?),
                    Some(_) => {
                        let config = DeviceConfig { device, bytes, peers: &peers, sharing };
                        Held::Device(DeviceRegion::create(self.driver(), &config)?)
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
                Held::Memfd(region) => Ok(region.base().addr().to_string()),
                Held::Device(region) => Ok(region.address().to_string()),
            },
            ["touch"] => Ok(touch(self.device_region()?.address() as usize)),
            ["copy", from, to, len] => {
                let (region, from) = (self.device_region()?, from.parse::<u64>()?);
                // SAFETY: inside the region, and apart from each other; the puppets take turns.
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
            ["window", bytes, access] => self.open_window(bytes.parse()?, access),
            ["slit", skip, bytes] => {
                let memory = Region::create("window", 8192, HugePages::IfAllowed, Protection::AllWrite)?;
                let (skip, bytes): (usize, usize) = (skip.parse()?, bytes.parse()?);
                assert!(skip + bytes <= memory.len() as usize);
                // SAFETY: a piece of memory that outlives the window.
                unsafe {
                    HostWindow::open(self.driver(), 0, memory.base().add(skip), bytes, WindowAccess::Read)?;
                }
                Ok(String::new())
            }
            ["shut"] => {
                self.opening = None;
                Ok(String::new())
            }
            ["show", offset, text] => {
                let offset: usize = offset.parse()?;
                let memory = &self.opening()?.memory;
                assert!(offset + text.len() <= memory.len() as usize);
                // SAFETY: inside the memory; the puppets take turns, and the devices do only what they are told.
                unsafe {
                    memory.base().add(offset).copy_from(NonNull::from(text.as_bytes()).cast(), text.len())
                };
                Ok(String::new())
            }
            ["look", offset, len] => {
                let at = self.opening()?.memory.base().as_ptr().expose_provenance();
                self.see(at, offset.parse()?, len.parse()?)
            }
            ["through", offset, len] => {
                self.see(self.opening()?.window.address() as usize, offset.parse()?, len.parse()?)
            }
            ["take", from, to, len] => {
                let source = self.opening()?.window.address() + from.parse::<u64>()?;
                // SAFETY: a piece of the window; the puppets take turns.
                unsafe { self.device_region()?.write_from_device(to.parse()?, source, len.parse()?)? };
                Ok(String::new())
            }
            ["give", from, to, len] => {
                let target = self.opening()?.window.address() + to.parse::<u64>()?;
                // SAFETY: as above.
                unsafe { self.device_region()?.read_to_device(from.parse()?, target, len.parse()?)? };
                Ok(String::new())
            }
            ["settle"] => {
                self.device_region()?.settle()?;
                Ok(String::new())
            }
            ["crowd", threads, rounds] => {
                crowd(self.device_region()?, threads.parse()?, rounds.parse()?);
                Ok(String::new())
            }
            ["break"] => {
                // SAFETY: the fake driver's own function.
                unsafe { library()?.get::<unsafe extern "C" fn()>(b"moontide_fake_break")?() };
                Ok(String::new())
            }
            ["close"] => {
                if let Some(Opening { window, .. }) = self.opening.take() {
                    window.close()?;
                }
                if let Some(Held::Device(region)) = self.held.take() {
                    region.close()?;
                }
                Ok(String::new())
            }
            ["drop"] => {
                self.opening = None;
                self.held = None;
                Ok(String::new())
            }
            ["world", rank, ranks, path, bytes, sharing, timeout_ms] => {
                let world = WorldConfig {
                    path: path.into(),
                    rank: Rank(rank.parse()?),
                    shape: WorldShape { ranks: ranks.parse()?, bytes: 4096 },
                    huge: HugePages::IfAllowed,
                    timeout: PATIENCE,
                };
                let sharing = (sharing == "handle").then_some(Sharing::Handle);
                let region =
                    DeviceConfig { device: rank.parse()?, bytes: bytes.parse()?, peers: &[], sharing };
                self.worlds = Some(self.join(&world, region, Duration::from_millis(timeout_ms.parse()?))?);
                Ok(String::new())
            }
            ["abandon"] => {
                self.worlds = None;
                Ok(String::new())
            }
            ["leave"] => {
                let (world, device) = self.worlds.take().ok_or("no world")?;
                device.leave(&world, PATIENCE)?;
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
            ["meet"] => Ok(format!("{:?}", self.worlds.as_ref().ok_or("no world")?.0.barrier(PATIENCE)?)),
            ["fork"] => self.fork(),
            ["adopt", device] => self.adopt(device.parse()?),
            ["current"] => self.current(),
            ["fds"] => Ok(std::fs::read_dir("/proc/self/fd")?.count().to_string()),
            ["left"] => Ok(left()),
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
        // SAFETY: the puppets take turns, as they are told.
        let world = unsafe { World::join(config) }?;
        let config = DeviceWorldConfig { path: &config.path, region, timeout };
        // SAFETY: as above.
        let device = unsafe { DeviceWorld::join(&world, self.driver(), &config) }?;
        Ok((world, device))
    }

    fn region_of(&self, rank: &str) -> Result<&DeviceRegion, Box<dyn std::error::Error>> {
        Ok(self.worlds.as_ref().ok_or("no world")?.1.region(Rank(rank.parse()?)))
    }

    fn open_window(&mut self, bytes: u64, access: &str) -> Told {
        let memory = Region::create("window", bytes, HugePages::IfAllowed, Protection::OwnerWrites)?;
        let view = match access {
            "view" | "view-write" => {
                // SAFETY: maps it to be read, by the same process.
                let fd = unsafe { memory.fd() }.try_clone_to_owned()?;
                Some(Region::import(fd, memory.len(), Protection::OwnerWrites)?)
            }
            _ => None,
        };
        let shown = view.as_ref().unwrap_or(&memory);
        let (at, len) = (shown.base(), shown.len() as usize);
        let access = if access.ends_with("write") { WindowAccess::ReadWrite } else { WindowAccess::Read };
        // SAFETY: the memory lives as long as the window, beside which it is kept.
        let window = unsafe {
            match &self.worlds {
                Some((_, world)) => world.window(at, len, access)?,
                None => HostWindow::open(self.driver(), 0, at, len, access)?,
            }
        };
        self.opening = Some(Opening { window, view, memory });
        Ok(String::new())
    }

    fn opening(&self) -> Result<&Opening, Box<dyn std::error::Error>> {
        self.opening.as_ref().ok_or_else(|| "no window".into())
    }

    /// Bytes at an address of the host that belong to the window.
    fn see(&self, at: usize, offset: usize, len: usize) -> Told {
        assert!(offset + len <= self.opening()?.window.len());
        let at = std::ptr::with_exposed_provenance::<u8>(at + offset);
        // SAFETY: inside the window's memory, by either of its addresses; the puppets take turns.
        Ok(String::from_utf8(unsafe { std::slice::from_raw_parts(at, len) }.to_vec())?)
    }

    fn device_region(&self) -> Result<&DeviceRegion, Box<dyn std::error::Error>> {
        match &self.held {
            Some(Held::Device(region)) => Ok(region),
            _ => Err("no region of a device".into()),
        }
    }

    fn describe(&self) -> Told {
        Ok(match self.held.as_ref().ok_or("no region")? {
            Held::Memfd(region) => format!("{} Descriptor {:?}", region.len(), region.atomic_domain()),
            Held::Device(region) => {
                format!("{} {:?} {:?}", region.len(), region.sharing(), region.atomic_domain())
            }
        })
    }

    fn offer(&self) -> Result<DeviceOffer, Box<dyn std::error::Error>> {
        match self.held.as_ref().ok_or("no region")? {
            // SAFETY: the other puppets take turns, as they are told.
            Held::Device(region) => Ok(unsafe { region.offer() }?),
            Held::Memfd(region) => {
                // SAFETY: as above.
                let fd = unsafe { region.fd() }.try_clone_to_owned()?;
                // An envelope for a descriptor; the vendor means nothing.
                let (vendor, domain, share) = (Vendor::Cuda, AtomicDomain::Device, Share::Descriptor(fd));
                Ok(DeviceOffer { vendor, len: region.len(), domain, share })
            }
        }
    }

    fn import(&mut self, device: u32, offer: DeviceOffer) -> Told {
        self.held = Some(match (self.vendor, offer.share) {
            (None, Share::Descriptor(fd)) => {
                Held::Memfd(Region::import(fd, offer.len, Protection::AllWrite)?)
            }
            (_, share) => {
                Held::Device(DeviceRegion::import(self.driver(), device, DeviceOffer { share, ..offer })?)
            }
        });
        self.describe()
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Told {
        match self.held.as_ref().ok_or("no region")? {
            Held::Device(region) => region.write(offset, bytes)?,
            Held::Memfd(region) => {
                assert!(offset + bytes.len() as u64 <= region.len());
                // SAFETY: inside the region; the puppets take turns.
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
            Held::Device(region) => region.read(offset, bytes)?,
            Held::Memfd(region) => {
                assert!(offset + bytes.len() as u64 <= region.len());
                // SAFETY: inside the region; the puppets take turns.
                unsafe {
                    let source = region.base().add(offset as usize).as_ptr();
                    std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len());
                }
            }
        }
        Ok(())
    }

    /// What a child says: that the region is not there, and that dropping it touches nothing of the parent's.
    fn fork(&mut self) -> Told {
        // SAFETY: the child uses nothing that a driver's thread could have left locked, and ends by `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let is_refused = match &self.held {
                Some(Held::Device(region)) => {
                    matches!(region.read(0, &mut [0]), Err(DeviceError::Forked))
                        && matches!(Driver::load(self.driver().vendor(), None), Err(DeviceError::Forked))
                        && matches!(self.driver().devices(), Err(DeviceError::Forked))
                }
                _ => true,
            };
            (self.opening, self.held) = (None, None);
            // SAFETY: without what the parent wants to run at its exit.
            unsafe { libc::_exit(if is_refused { 7 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: a valid place.
        unsafe { libc::waitpid(pid, &mut status, 0) };
        match libc::WEXITSTATUS(status) {
            7 if libc::WIFEXITED(status) => Ok("refused".to_owned()),
            _ => Err(format!("the child ended with {status:#x}").into()),
        }
    }

    /// Chooses a device, as a caller who starts kernels of its own.
    fn adopt(&self, device: c_int) -> Told {
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

    fn current(&self) -> Told {
        let (library, mut current) = (library()?, 0usize);
        let name = if self.driver().vendor() == Vendor::Cuda { "cuCtxGetCurrent" } else { "hipGetDevice" };
        // SAFETY: writes a pointer or, on a little-endian machine, its lower half.
        unsafe { library.get::<unsafe extern "C" fn(*mut usize) -> c_int>(name.as_bytes())?(&mut current) };
        Ok(current.to_string())
    }
}

/// How a processor fares at an address.
fn touch(address: usize) -> String {
    // SAFETY: the child reads a byte and ends by `_exit`: it uses nothing that another thread could have left locked.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let at = std::ptr::with_exposed_provenance::<u8>(address);
        // SAFETY: on the fake driver, a byte that is mapped and initialized, or one whose page refuses all use. The latter
        // ends this child, which is what is asked; a core of it would be of no use.
        unsafe {
            libc::prctl(libc::PR_SET_DUMPABLE, 0);
            libc::_exit(c_int::from(at.read_volatile()));
        }
    }
    let mut status = 0;
    // SAFETY: a valid place.
    unsafe { libc::waitpid(pid, &mut status, 0) };
    match libc::WIFSIGNALED(status) {
        true => format!("signal {}", libc::WTERMSIG(status)),
        false => format!("found {}", libc::WEXITSTATUS(status)),
    }
}

/// Every thread writes, moves and reads bytes of its own, all through one region.
fn crowd(region: &DeviceRegion, threads: u64, rounds: u64) {
    const BYTES: u64 = 1024;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let [here, there] = [2 * thread * BYTES, (2 * thread + 1) * BYTES];
                for round in 0..rounds {
                    let (wrote, mut found) =
                        ([(thread * 31 + round) as u8; BYTES as usize], [0; BYTES as usize]);
                    region.write(here, &wrote).unwrap();
                    // SAFETY: two pieces of the region that no other thread uses.
                    unsafe { region.write_from_device(there, region.address() + here, BYTES) }.unwrap();
                    region.read(there, &mut found).unwrap();
                    assert!(wrote == found, "thread {thread}, round {round}");
                }
            });
        }
    });
}

fn library() -> Result<Library, libloading::Error> {
    // SAFETY: ours.
    let library = unsafe { Library::new(fake()) }?;
    // SAFETY: once more, so that dropping the first does not unload it.
    std::mem::forget(unsafe { Library::new(fake()) }?);
    Ok(library)
}

fn left() -> String {
    let (library, mut text) = (library().unwrap(), [0; 512]);
    type Left = unsafe extern "C" fn(*mut std::ffi::c_char, usize);
    // SAFETY: the fake driver's own function, with a buffer of that length.
    unsafe {
        library.get::<Left>(b"moontide_fake_left").unwrap()(text.as_mut_ptr(), text.len());
        CStr::from_ptr(text.as_ptr()).to_str().unwrap().to_owned()
    }
}
