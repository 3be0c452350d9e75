//! Strictness of the fake driver about streams and host memory: misuse, called by the vendors' names. If it accepted
//! one, the tests of regions and registrations would prove less. One test, because all cases share one driver.

mod child_process;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;

use libloading::os::unix::Library;
use moontide_heap::{HugePages, Protection, Region};
use moontide_symmetric::Vendor;

const BYTES: usize = 8192;

type Plain = unsafe extern "C" fn(u32) -> c_int;
type Retain = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
type SetContext = unsafe extern "C" fn(usize) -> c_int;
type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type New = unsafe extern "C" fn(*mut u64, u32) -> c_int;
type OnStream = unsafe extern "C" fn(u64) -> c_int;
type HostToDevice = unsafe extern "C" fn(u64, *const u8, usize, u64) -> c_int;
type DeviceToHost = unsafe extern "C" fn(*mut u8, u64, usize, u64) -> c_int;
type DeviceToDevice = unsafe extern "C" fn(u64, u64, usize, u64) -> c_int;
type Register = unsafe extern "C" fn(*mut c_void, usize, u32) -> c_int;
type DevicePointer = unsafe extern "C" fn(*mut u64, *mut c_void, u32) -> c_int;
type Unregister = unsafe extern "C" fn(*mut c_void) -> c_int;

macro_rules! call {
    ($library:expr, $name:expr, $type:ty $(, $argument:expr)*) => {
        // SAFETY: with the type that the vendor's header has for it; pointers and memory outlive the work.
        unsafe { $library.get::<$type>($name.as_bytes()).unwrap()($($argument),*) }
    };
}

#[test]
fn fake_driver_rejects_misuse_of_streams_and_host_registrations() {
    // SAFETY: the fake driver of this workspace.
    let library: &'static Library =
        Box::leak(Box::new(unsafe { Library::new(child_process::fake()) }.unwrap()));
    assert_eq!(call!(library, "cuInit", Plain, 0), 0);
    let mut context = 0;
    assert_eq!(call!(library, "cuDevicePrimaryCtxRetain", Retain, &mut context, 0), 0);
    assert_eq!(call!(library, "cuCtxSetCurrent", SetContext, context), 0);
    for vendor in Vendor::ALL {
        work_is_done_when_waited_for(library, vendor);
    }
    registrations_are_checked(library);
    for vendor in Vendor::ALL {
        registrations_have_device_addresses(library, vendor);
    }
    assert_eq!(call!(library, "cuDevicePrimaryCtxRelease_v2", unsafe extern "C" fn(c_int) -> c_int, 0), 0);
    assert_eq!(leaks(library), "nothing left");
}

/// Returns the vendor's name for a function of CUDA.
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

fn leaks(library: &Library) -> String {
    let mut text = [0; 512];
    call!(
        library,
        "moontide_fake_leaks",
        unsafe extern "C" fn(*mut c_char, usize),
        text.as_mut_ptr(),
        text.len()
    );
    // SAFETY: terminated by a zero.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap().to_owned()
}

fn work_is_done_when_waited_for(library: &Library, vendor: Vendor) {
    let (mut device, mut stream) = (0, 0);
    assert_eq!(call!(library, named(vendor, "cuMemAlloc_v2"), Alloc, &mut device, BYTES), 0);
    assert_eq!(call!(library, named(vendor, "cuStreamCreate"), New, &mut stream, 1), 0);
    let (written, mut found) = ([7u8; 16], [0u8; 16]);
    // The test accesses the buffer by its address, as the driver does, to read the result of the work.
    let target = NonNull::from(&mut found).cast::<u8>();
    // SAFETY: the buffer above.
    let seen = || unsafe { target.read_volatile() };

    // Misuse: without a wait, the bytes are not written.
    assert_eq!(
        call!(
            library,
            named(vendor, "cuMemcpyHtoDAsync_v2"),
            HostToDevice,
            device,
            written.as_ptr(),
            16,
            stream
        ),
        0
    );
    assert_eq!(
        call!(
            library,
            named(vendor, "cuMemcpyDtoDAsync_v2"),
            DeviceToDevice,
            device + 64,
            device,
            16,
            stream
        ),
        0
    );
    assert_eq!(
        call!(
            library,
            named(vendor, "cuMemcpyDtoHAsync_v2"),
            DeviceToHost,
            target.as_ptr(),
            device + 64,
            16,
            stream
        ),
        0
    );
    assert_eq!(seen(), 0, "done before a wait");
    assert_eq!(call!(library, named(vendor, "cuStreamSynchronize"), OnStream, stream), 0);
    assert_eq!(seen(), 7);
    // The other two ways to wait.
    // SAFETY: the buffer above.
    let clear = || unsafe { target.write_volatile(0) };
    clear();
    assert_eq!(
        call!(
            library,
            named(vendor, "cuMemcpyDtoHAsync_v2"),
            DeviceToHost,
            target.as_ptr(),
            device + 64,
            16,
            stream
        ),
        0
    );
    assert_eq!(call!(library, named(vendor, "cuCtxSynchronize"), unsafe extern "C" fn() -> c_int), 0);
    assert_eq!(seen(), 7);
    clear();
    assert_eq!(
        call!(
            library,
            named(vendor, "cuMemcpyDtoHAsync_v2"),
            DeviceToHost,
            target.as_ptr(),
            device + 64,
            16,
            stream
        ),
        0
    );
    assert_eq!(leaks(library), "1 allocations, 1 streams, 1 contexts");
    assert_eq!(call!(library, named(vendor, "cuStreamDestroy_v2"), OnStream, stream), 0);
    assert_eq!(seen(), 7);

    assert_eq!(
        call!(library, named(vendor, "cuStreamSynchronize"), OnStream, stream),
        400,
        "a destroyed stream"
    );
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyHtoDAsync_v2"), HostToDevice, device, written.as_ptr(), 16, 0),
        400,
        "the legacy stream"
    );
    assert_eq!(call!(library, named(vendor, "cuStreamCreate"), New, &mut stream, 1), 0);
    let end = device + BYTES as u64;
    assert_eq!(
        call!(
            library,
            named(vendor, "cuMemcpyHtoDAsync_v2"),
            HostToDevice,
            end - 8,
            written.as_ptr(),
            16,
            stream
        ),
        1
    );
    assert_eq!(
        call!(
            library,
            named(vendor, "cuMemcpyDtoHAsync_v2"),
            DeviceToHost,
            target.as_ptr(),
            end - 8,
            16,
            stream
        ),
        1
    );
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyDtoDAsync_v2"), DeviceToDevice, end - 8, device, 16, stream),
        1,
        "target out of range"
    );
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyDtoDAsync_v2"), DeviceToDevice, device, end - 8, 16, stream),
        1,
        "source out of range"
    );
    assert_eq!(
        call!(library, named(vendor, "cuMemcpyDtoDAsync_v2"), DeviceToDevice, device + 8, device, 16, stream),
        1,
        "overlap"
    );
    assert_eq!(call!(library, named(vendor, "cuStreamDestroy_v2"), OnStream, stream), 0);
    assert_eq!(call!(library, named(vendor, "cuMemFree_v2"), unsafe extern "C" fn(u64) -> c_int, device), 0);
}

fn registrations_are_checked(library: &Library) {
    let memory = Region::create("strict", BYTES as u64, HugePages::Auto, Protection::OwnerWrites).unwrap();
    // SAFETY: maps it read-only, in the same process.
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
        "misaligned"
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
        "read-only memory registered for writing"
    );
    assert_eq!(
        call!(library, "hipHostRegister", Register, at, BYTES, 11),
        1,
        "a flag without a meaning in HIP"
    );

    assert_eq!(call!(library, "cuMemHostRegister_v2", Register, view, BYTES, 11), 0);
    assert_eq!(call!(library, "cuMemHostUnregister", Unregister, view), 0);
    assert_eq!(call!(library, "cuMemHostRegister_v2", Register, at, BYTES, 3), 0);
    assert_eq!(call!(library, "cuMemHostRegister_v2", Register, next, 4096, 3), 712, "registered twice");
    assert_eq!(
        call!(library, "cuMemHostGetDevicePointer_v2", DevicePointer, &mut address, at, 1),
        1,
        "an undefined flag"
    );
    assert_eq!(call!(library, "cuMemHostGetDevicePointer_v2", DevicePointer, &mut address, at, 0), 0);
    assert!(address.abs_diff(at.addr() as u64) >= BYTES as u64, "the device has the host's address");
    let first = address;
    assert_eq!(call!(library, "cuMemHostGetDevicePointer_v2", DevicePointer, &mut address, next, 0), 0);
    assert_eq!(address, first + 4096, "an address inside the registration");
    assert_eq!(
        call!(library, "cuMemHostUnregister", Unregister, next),
        713,
        "not the start of the registration"
    );
    assert_eq!(leaks(library), "1 registrations, 1 contexts");
    assert_eq!(call!(library, "cuMemHostUnregister", Unregister, at), 0);
    assert_eq!(call!(library, "cuMemHostUnregister", Unregister, at), 713, "unregistered twice");
}

/// Misuse: the host's address in a device's copy, and the device's address as the host's end of one.
fn registrations_have_device_addresses(library: &Library, vendor: Vendor) {
    let memory = Region::create("strict", BYTES as u64, HugePages::Auto, Protection::AllWrite).unwrap();
    let base = memory.base();
    let (at, host) = (base.as_ptr().cast::<c_void>(), base.addr().get() as u64);
    let (mut device, mut stream, mut alias) = (0, 0, 0u64);
    assert_eq!(call!(library, named(vendor, "cuMemAlloc_v2"), Alloc, &mut device, BYTES), 0);
    assert_eq!(call!(library, named(vendor, "cuStreamCreate"), New, &mut stream, 1), 0);
    let copy = |target: u64, source: u64| {
        call!(library, named(vendor, "cuMemcpyDtoDAsync_v2"), DeviceToDevice, target, source, 16, stream)
    };
    let wait = || call!(library, named(vendor, "cuStreamSynchronize"), OnStream, stream);
    assert_eq!(copy(device, host), 1, "before it is registered");
    assert_eq!(call!(library, named(vendor, "cuMemHostRegister_v2"), Register, at, BYTES, 3), 0);
    let get_address = named(vendor, "cuMemHostGetDevicePointer_v2");
    assert_eq!(call!(library, get_address, DevicePointer, &mut alias, at, 0), 0);
    assert_ne!(alias, host);

    // The device sees writes of the host, and the host those of the device.
    // SAFETY: inside the memory, which only this test uses; the device has no work yet.
    unsafe { base.write_volatile(9) };
    assert_eq!([copy(device, alias), copy(alias + 4096, device), wait()], [0; 3]);
    // SAFETY: inside the memory; the device's work is complete.
    assert_eq!(unsafe { base.add(4096).read_volatile() }, 9);

    assert_eq!(copy(device, host), 1, "the host's address as the source");
    assert_eq!(copy(host, device), 1, "the host's address as the target");
    assert_eq!(copy(device, alias + BYTES as u64 - 8), 1, "beyond the end");
    for wrong in [alias, device] {
        let wrong = std::ptr::without_provenance_mut::<u8>(wrong as usize);
        let (copy_in, copy_out) =
            (named(vendor, "cuMemcpyHtoDAsync_v2"), named(vendor, "cuMemcpyDtoHAsync_v2"));
        assert_eq!(
            call!(library, copy_in, HostToDevice, device + 64, wrong, 16, stream),
            1,
            "a device's address as the host's source"
        );
        assert_eq!(
            call!(library, copy_out, DeviceToHost, wrong, device + 64, 16, stream),
            1,
            "a device's address as the host's target"
        );
    }
    // The host's end of a copy may be registered memory.
    let copy_in = named(vendor, "cuMemcpyHtoDAsync_v2");
    assert_eq!(call!(library, copy_in, HostToDevice, device, base.as_ptr(), 16, stream), 0);
    assert_eq!(wait(), 0);

    assert_eq!(call!(library, named(vendor, "cuMemHostUnregister"), Unregister, at), 0);
    assert_eq!(copy(device, alias), 1, "an ended registration");
    assert_eq!(call!(library, named(vendor, "cuStreamDestroy_v2"), OnStream, stream), 0);
    assert_eq!(call!(library, named(vendor, "cuMemFree_v2"), unsafe extern "C" fn(u64) -> c_int, device), 0);
}
