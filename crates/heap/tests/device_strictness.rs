//! The fake driver's strictness about streams and memory of the host: planted mistakes, called by the vendors' names. Were one
//! let through, the tests of regions and windows would prove less than they say. One test, as they share one driver.

mod puppet;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;

use libloading::os::unix::Library;
use moontide_heap::{HugePages, Protection, Region, Vendor};

const BYTES: usize = 8192;

type Plain = unsafe extern "C" fn(u32) -> c_int;
type Retain = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
type SetContext = unsafe extern "C" fn(usize) -> c_int;
type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type New = unsafe extern "C" fn(*mut u64, u32) -> c_int;
type OnStream = unsafe extern "C" fn(u64) -> c_int;
type In = unsafe extern "C" fn(u64, *const u8, usize, u64) -> c_int;
type Out = unsafe extern "C" fn(*mut u8, u64, usize, u64) -> c_int;
type Across = unsafe extern "C" fn(u64, u64, usize, u64) -> c_int;
type Register = unsafe extern "C" fn(*mut c_void, usize, u32) -> c_int;
type DevicePointer = unsafe extern "C" fn(*mut u64, *mut c_void, u32) -> c_int;
type Unregister = unsafe extern "C" fn(*mut c_void) -> c_int;

macro_rules! call {
    ($library:expr, $name:expr, $type:ty $(, $argument:expr)*) => {
        // SAFETY: with the type that the vendor's header has for it; places and memory outlive the work.
        unsafe { $library.get::<$type>($name.as_bytes()).unwrap()($($argument),*) }
    };
}

#[test]
fn wrong_use_of_streams_and_windows_is_answered() {
    // SAFETY: ours.
    let library: &'static Library = Box::leak(Box::new(unsafe { Library::new(puppet::fake()) }.unwrap()));
    assert_eq!(call!(library, "cuInit", Plain, 0), 0);
    let mut context = 0;
    assert_eq!(call!(library, "cuDevicePrimaryCtxRetain", Retain, &mut context, 0), 0);
    assert_eq!(call!(library, "cuCtxSetCurrent", SetContext, context), 0);
    for vendor in Vendor::ALL {
        work_is_done_when_it_is_waited_for(library, vendor);
    }
    windows_are_checked(library);
    for vendor in Vendor::ALL {
        windows_have_addresses_of_their_own(library, vendor);
    }
    assert_eq!(call!(library, "cuDevicePrimaryCtxRelease_v2", unsafe extern "C" fn(c_int) -> c_int, 0), 0);
    assert_eq!(left(library), "nothing left");
}

/// The vendor's name for a function of CUDA.
fn named(vendor: Vendor, cuda: &str) -> String {
    let plain = cuda.trim_start_matches("cu").trim_end_matches("_v2");
    match (vendor, plain) {
        (Vendor::Cuda, _) => cuda.to_owned(),
        (Vendor::Hip, "MemAlloc") => "hipMalloc".to_owned(),
        (Vendor::Hip, "MemFree") => "hipFree".to_owned(),
        (Vendor::Hip, "StreamCreate") => "hipStreamCreateWithFlags".to_owned(),
        (Vendor::Hip, "MemHostRegister") => "hipHostRegister".to_owned(),
        (Vendor::Hip, "MemHostGetDevicePointer") => "hipHostGetDevicePointer".to_owned(),
        (Vendor::Hip, "MemHostUnregister") => "hipHostUnregister".to_owned(),
        (Vendor::Hip, "CtxSynchronize") => "hipDeviceSynchronize".to_owned(),
        (Vendor::Hip, plain) => format!("hip{plain}"),
    }
}

fn left(library: &Library) -> String {
    let mut text = [0; 512];
    call!(
        library,
        "moontide_fake_left",
        unsafe extern "C" fn(*mut c_char, usize),
        text.as_mut_ptr(),
        text.len()
    );
    // SAFETY: ended by a zero.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap().to_owned()
}

fn work_is_done_when_it_is_waited_for(library: &Library, vendor: Vendor) {
    let (mut device, mut stream) = (0, 0);
    assert_eq!(call!(library, named(vendor, "cuMemAlloc_v2"), Alloc, &mut device, BYTES), 0);
    assert_eq!(call!(library, named(vendor, "cuStreamCreate"), New, &mut stream, 1), 0);
    let (wrote, mut found) = ([7u8; 16], [0u8; 16]);
    // A buffer is seen by its address alone, as by a driver: what the work did is read through it.
    let place = NonNull::from(&mut found).cast::<u8>();
    // SAFETY: the buffer above.
    let seen = || unsafe { place.read_volatile() };

    // The planted mistake: nobody waits, and the bytes are not there.
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyHtoDAsync_v2"), In, device, wrote.as_ptr(), 16, stream),
        0
    );
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyDtoDAsync_v2"), Across, device + 64, device, 16, stream),
        0
    );
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyDtoHAsync_v2"), Out, place.as_ptr(), device + 64, 16, stream),
        0
    );
    assert_eq!(seen(), 0, "done before somebody waited");
    assert_eq!(call!(library, named(vendor, "cuStreamSynchronize"), OnStream, stream), 0);
    assert_eq!(seen(), 7);
    // Each of the other two ways to wait.
    // SAFETY: the buffer above.
    let clear = || unsafe { place.write_volatile(0) };
    clear();
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyDtoHAsync_v2"), Out, place.as_ptr(), device + 64, 16, stream),
        0
    );
    assert_eq!(call!(library, named(vendor, "cuCtxSynchronize"), unsafe extern "C" fn() -> c_int), 0);
    assert_eq!(seen(), 7);
    clear();
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyDtoHAsync_v2"), Out, place.as_ptr(), device + 64, 16, stream),
        0
    );
    assert_eq!(left(library), "1 allocations, 1 streams, 1 contexts");
    assert_eq!(call!(library, named(vendor, "cuStreamDestroy_v2"), OnStream, stream), 0);
    assert_eq!(seen(), 7);

    assert_eq!(
        call!(library, named(vendor, "cuStreamSynchronize"), OnStream, stream),
        400,
        "a stream that is gone"
    );
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyHtoDAsync_v2"), In, device, wrote.as_ptr(), 16, 0),
        400,
        "the legacy one"
    );
    assert_eq!(call!(library, named(vendor, "cuStreamCreate"), New, &mut stream, 1), 0);
    let end = device + BYTES as u64;
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyHtoDAsync_v2"), In, end - 8, wrote.as_ptr(), 16, stream),
        1
    );
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyDtoHAsync_v2"), Out, place.as_ptr(), end - 8, 16, stream),
        1
    );
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyDtoDAsync_v2"), Across, end - 8, device, 16, stream),
        1,
        "the target"
    );
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyDtoDAsync_v2"), Across, device, end - 8, 16, stream),
        1,
        "the source"
    );
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyDtoDAsync_v2"), Across, device + 8, device, 16, stream),
        1,
        "overlap"
    );
    assert_eq!(call!(library, named(vendor, "cuStreamDestroy_v2"), OnStream, stream), 0);
    assert_eq!(call!(library, named(vendor, "cuMemFree_v2"), unsafe extern "C" fn(u64) -> c_int, device), 0);
}

fn windows_are_checked(library: &Library) {
    let memory =
        Region::create("strict", BYTES as u64, HugePages::IfAllowed, Protection::OwnerWrites).unwrap();
    // SAFETY: maps it to be read, by the same process.
    let fd = unsafe { memory.fd() }.try_clone_to_owned().unwrap();
    let view = Region::import(fd, BYTES as u64, Protection::OwnerWrites).unwrap();
    let at: *mut c_void = memory.base().as_ptr().cast();
    let view: *mut c_void = view.base().as_ptr().cast();
    let mut address = 0u64;
    let next = at.wrapping_byte_add(4096);

    assert_eq!(call!(library, "cuMemHostUnregister", Unregister, at), 713, "never registered");
    assert_eq!(call!(library, "cuMemHostGetDevicePointer_v2", DevicePointer, &mut address, at, 0), 1);
    assert_eq!(
        call!(library, "cuMemHostRegister_v2", Register, at.wrapping_byte_add(64), 4096, 3),
        1,
        "a slit"
    );
    assert_eq!(call!(library, "cuMemHostRegister_v2", Register, at, 100, 3), 1, "part of a page");
    assert_eq!(
        call!(library, "cuMemHostRegister_v2", Register, at, BYTES, 16),
        1,
        "a flag that does not exist"
    );
    let nowhere = std::ptr::without_provenance_mut::<c_void>(4096);
    assert_eq!(call!(library, "cuMemHostRegister_v2", Register, nowhere, 4096, 3), 1, "not mapped");
    assert_eq!(
        call!(library, "cuMemHostRegister_v2", Register, view, BYTES, 3),
        1,
        "read-only, to be written"
    );
    assert_eq!(call!(library, "hipHostRegister", Register, at, BYTES, 11), 1, "HIP's flag without a meaning");

    assert_eq!(call!(library, "cuMemHostRegister_v2", Register, view, BYTES, 11), 0);
    assert_eq!(call!(library, "cuMemHostUnregister", Unregister, view), 0);
    assert_eq!(call!(library, "cuMemHostRegister_v2", Register, at, BYTES, 3), 0);
    assert_eq!(call!(library, "cuMemHostRegister_v2", Register, next, 4096, 3), 712, "registered twice");
    assert_eq!(
        call!(library, "cuMemHostGetDevicePointer_v2", DevicePointer, &mut address, at, 1),
        1,
        "a flag"
    );
    assert_eq!(call!(library, "cuMemHostGetDevicePointer_v2", DevicePointer, &mut address, at, 0), 0);
    assert!(address.abs_diff(at.addr() as u64) >= BYTES as u64, "another address than the host's");
    let first = address;
    assert_eq!(call!(library, "cuMemHostGetDevicePointer_v2", DevicePointer, &mut address, next, 0), 0);
    assert_eq!(address, first + 4096, "inside of it");
    assert_eq!(call!(library, "cuMemHostUnregister", Unregister, next), 713, "not where it begins");
    assert_eq!(left(library), "1 windows, 1 contexts");
    assert_eq!(call!(library, "cuMemHostUnregister", Unregister, at), 0);
    assert_eq!(call!(library, "cuMemHostUnregister", Unregister, at), 713, "twice");
}

/// The planted mistakes: the host's address in a device's copy, and the device's as the host's side of one.
fn windows_have_addresses_of_their_own(library: &Library, vendor: Vendor) {
    let memory = Region::create("strict", BYTES as u64, HugePages::IfAllowed, Protection::AllWrite).unwrap();
    let place = memory.base();
    let (at, host) = (place.as_ptr().cast::<c_void>(), place.addr().get() as u64);
    let (mut device, mut stream, mut shown) = (0, 0, 0u64);
    assert_eq!(call!(library, named(vendor, "cuMemAlloc_v2"), Alloc, &mut device, BYTES), 0);
    assert_eq!(call!(library, named(vendor, "cuStreamCreate"), New, &mut stream, 1), 0);
    let across = |target: u64, source: u64| {
        call!(library, named(vendor, "cuMemcpyDtoDAsync_v2"), Across, target, source, 16, stream)
    };
    let wait = || call!(library, named(vendor, "cuStreamSynchronize"), OnStream, stream);
    assert_eq!(across(device, host), 1, "before it is registered");
    assert_eq!(call!(library, named(vendor, "cuMemHostRegister_v2"), Register, at, BYTES, 3), 0);
    let ask = named(vendor, "cuMemHostGetDevicePointer_v2");
    assert_eq!(call!(library, ask, DevicePointer, &mut shown, at, 0), 0);
    assert_ne!(shown, host);

    // What the host writes is there for the device, and the other way round.
    // SAFETY: inside the memory, that nobody else knows; the device has nothing to do yet.
    unsafe { place.write_volatile(9) };
    assert_eq!([across(device, shown), across(shown + 4096, device), wait()], [0; 3]);
    // SAFETY: inside the memory; what the device had to do is over.
    assert_eq!(unsafe { place.add(4096).read_volatile() }, 9);

    assert_eq!(across(device, host), 1, "the host's address as the source");
    assert_eq!(across(host, device), 1, "and as the target");
    assert_eq!(across(device, shown + BYTES as u64 - 8), 1, "beyond the end");
    for wrong in [shown, device] {
        let wrong = std::ptr::without_provenance_mut::<u8>(wrong as usize);
        let (copy_in, copy_out) =
            (named(vendor, "cuMemcpyHtoDAsync_v2"), named(vendor, "cuMemcpyDtoHAsync_v2"));
        assert_eq!(
            call!(library, copy_in, In, device + 64, wrong, 16, stream),
            1,
            "a device's as the host's"
        );
        assert_eq!(call!(library, copy_out, Out, wrong, device + 64, 16, stream), 1, "and as the target");
    }
    // The host's own side of a copy may be memory that has a window.
    let copy_in = named(vendor, "cuMemcpyHtoDAsync_v2");
    assert_eq!(call!(library, copy_in, In, device, place.as_ptr(), 16, stream), 0);
    assert_eq!(wait(), 0);

    assert_eq!(call!(library, named(vendor, "cuMemHostUnregister"), Unregister, at), 0);
    assert_eq!(across(device, shown), 1, "a window that is gone");
    assert_eq!(call!(library, named(vendor, "cuStreamDestroy_v2"), OnStream, stream), 0);
    assert_eq!(call!(library, named(vendor, "cuMemFree_v2"), unsafe extern "C" fn(u64) -> c_int, device), 0);
}
