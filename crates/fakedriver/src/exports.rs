//! The functions under the names of both vendors. Each hands its arguments to the ledger and writes the answer.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::codes::{self, INVALID_VALUE};
use crate::journal::call;
use crate::ledger::{Api, Job, Ledger, Prop};

/// `CUmemAllocationProp`
#[repr(C)]
struct RawProp {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    device: c_int,
    win32: u64,
    flags: u64,
}

/// `CUmemAccessDesc`
#[repr(C)]
struct RawAccess {
    kind: c_int,
    device: c_int,
    flags: c_int,
}

/// `CUipcMemHandle`
#[repr(C)]
struct RawHandle([u8; 64]);

/// Writes an answer to where the caller wants it.
fn answer<T>(place: *mut T, value: Result<T, c_int>) -> Result<(), c_int> {
    let value = value?;
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's pointer to a place for a `T`.
    unsafe { place.write(value) };
    Ok(())
}

fn prop_of(prop: *const RawProp) -> Result<Prop, c_int> {
    // SAFETY: the caller's pointer to a valid struct, or null.
    let prop = unsafe { prop.as_ref() }.ok_or(INVALID_VALUE)?;
    let RawProp { kind, handle_types, location_kind, device, win32, flags } = *prop;
    Ok(Prop { kind, handle_types, location_kind, device, rest: win32 | flags })
}

/// HIP before 7.1 takes a pointer to the descriptor, later ones and CUDA the descriptor itself.
fn descriptor(ledger: &Ledger, shareable: *mut c_void) -> Result<c_int, c_int> {
    if ledger.api == Api::Cuda || ledger.version() >= 70_100_000 {
        return c_int::try_from(shareable.addr()).map_err(|_| INVALID_VALUE);
    }
    // A small number is no address: what would end a real process is told here.
    if shareable.addr() < 4096 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: a pointer to an int, by the rules of that version.
    Ok(unsafe { shareable.cast::<c_int>().read() })
}

macro_rules! functions {
    ($($cuda:ident / $hip:ident ($($argument:ident: $type:ty),*) shows($($shown:expr),*) $body:expr;)*) => {$(
        functions!(@one Cuda $cuda ($($argument: $type),*) ($($shown),*) $body);
        functions!(@one Hip $hip ($($argument: $type),*) ($($shown),*) $body);
    )*};
    (@one $api:ident $name:ident ($($argument:ident: $type:ty),*) ($($shown:expr),*) $body:expr) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments, reason = "the vendor's name and form")]
        unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            let shown: Vec<String> = vec![$(format!("{:#x}", $shown)),*];
            let body: &dyn Fn(&mut Ledger, $($type),*) -> Result<(), c_int> = &$body;
            call(Api::$api, stringify!($name), format_args!("{}", shown.join(", ")), &mut |ledger| {
                body(ledger, $($argument.clone()),*)
            })
        }
    };
}

impl Clone for RawHandle {
    fn clone(&self) -> RawHandle {
        RawHandle(self.0)
    }
}

functions! {
    cuInit / hipInit (flags: c_uint) shows(flags) |ledger, flags| ledger.init(flags);
    cuDriverGetVersion / hipRuntimeGetVersion (version: *mut c_int) shows()
        |ledger, version| answer(version, Ok(ledger.version()));
    cuDeviceGetCount / hipGetDeviceCount (count: *mut c_int) shows()
        |ledger, count| { ledger.started()?; answer(count, Ok(ledger.settings.devices)) };
    cuDeviceGet / hipDeviceGet (device: *mut c_int, ordinal: c_int) shows(ordinal)
        |ledger, device, ordinal| answer(device, ledger.device(ordinal).map(|()| ordinal));
    cuDeviceGetName / hipDeviceGetName (name: *mut c_char, len: c_int, device: c_int) shows(len, device)
        |ledger, name, len, device| {
            ledger.device(device)?;
            let text = format!("Fake device {device}\0");
            if name.is_null() || (len as usize) < text.len() {
                return Err(INVALID_VALUE);
            }
            // SAFETY: the caller's buffer has `len` bytes.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), text.len()) };
            Ok(())
        };
    cuDeviceTotalMem_v2 / hipDeviceTotalMem (bytes: *mut usize, device: c_int) shows(device)
        |ledger, bytes, device| {
            answer(bytes, ledger.device(device).map(|()| ledger.settings.memory as usize))
        };
    cuDeviceGetAttribute / hipDeviceGetAttribute (value: *mut c_int, attribute: c_int, device: c_int)
        shows(attribute, device)
        |ledger, value, attribute, device| answer(value, ledger.attribute(attribute, device));
    cuDeviceCanAccessPeer / hipDeviceCanAccessPeer (can: *mut c_int, device: c_int, peer: c_int) shows(device, peer)
        |ledger, can, device, peer| {
            let both = ledger.device(device).and_then(|()| ledger.device(peer));
            answer(can, both.map(|()| (device != peer && ledger.settings.can_access(device, peer)).into()))
        };
    cuPointerGetAttribute / hipPointerGetAttribute (data: *mut c_void, attribute: c_int, address: u64)
        shows(attribute, address)
        |ledger, data, attribute, address| {
            answer(data.cast::<c_int>(), ledger.pointer_attribute(attribute, address))
        };
    cuCtxSynchronize / hipDeviceSynchronize () shows() |ledger| ledger.synchronize();
    cuMemGetAllocationGranularity / hipMemGetAllocationGranularity
        (granularity: *mut usize, prop: *const RawProp, option: c_int) shows(option)
        |ledger, granularity, prop, option| {
            answer(granularity, ledger.granularity(&prop_of(prop)?, option).map(|bytes| bytes as usize))
        };
    cuMemCreate / hipMemCreate (handle: *mut u64, bytes: usize, prop: *const RawProp, flags: c_ulonglong)
        shows(bytes, flags)
        |ledger, handle, bytes, prop, flags| answer(handle, ledger.create(bytes as u64, &prop_of(prop)?, flags));
    cuMemRelease / hipMemRelease (handle: u64) shows(handle) |ledger, handle| ledger.release(handle);
    cuMemAddressReserve / hipMemAddressReserve
        (address: *mut u64, bytes: usize, alignment: usize, wish: u64, flags: c_ulonglong)
        shows(bytes, alignment, wish, flags)
        |ledger, address, bytes, alignment, wish, flags| {
            answer(address, ledger.reserve(bytes as u64, alignment as u64, wish, flags))
        };
    cuMemAddressFree / hipMemAddressFree (address: u64, bytes: usize) shows(address, bytes)
        |ledger, address, bytes| ledger.free_addresses(address, bytes as u64);
    cuMemMap / hipMemMap (address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong)
        shows(address, bytes, offset, handle, flags)
        |ledger, address, bytes, offset, handle, flags| {
            ledger.map(address, bytes as u64, offset as u64, handle, flags)
        };
    cuMemUnmap / hipMemUnmap (address: u64, bytes: usize) shows(address, bytes)
        |ledger, address, bytes| ledger.unmap(address, bytes as u64);
    cuMemSetAccess / hipMemSetAccess (address: u64, bytes: usize, access: *const RawAccess, count: usize)
        shows(address, bytes, count)
        |ledger, address, bytes, access, count| {
            if access.is_null() {
                return Err(INVALID_VALUE);
            }
            // SAFETY: the caller's array of `count` structs.
            let access = unsafe { std::slice::from_raw_parts(access, count) };
            let access: Vec<_> = access.iter().map(|a| (a.kind, a.device, a.flags)).collect();
            ledger.set_access(address, bytes as u64, &access)
        };
    cuMemExportToShareableHandle / hipMemExportToShareableHandle
        (shareable: *mut c_void, handle: u64, kind: c_int, flags: c_ulonglong) shows(handle, kind, flags)
        |ledger, shareable, handle, kind, flags| {
            answer(shareable.cast::<c_int>(), ledger.export(handle, kind, flags))
        };
    cuMemImportFromShareableHandle / hipMemImportFromShareableHandle
        (handle: *mut u64, shareable: *mut c_void, kind: c_int) shows(kind)
        |ledger, handle, shareable, kind| {
            let fd = descriptor(ledger, shareable)?;
            answer(handle, ledger.import(fd, kind))
        };
    cuMemAlloc_v2 / hipMalloc (address: *mut u64, bytes: usize) shows(bytes)
        |ledger, address, bytes| answer(address, ledger.alloc(bytes as u64));
    cuMemFree_v2 / hipFree (address: u64) shows(address) |ledger, address| ledger.free(address);
    cuIpcGetMemHandle / hipIpcGetMemHandle (handle: *mut RawHandle, address: u64) shows(address)
        |ledger, handle, address| answer(handle, ledger.ipc_handle(address).map(RawHandle));
    cuIpcOpenMemHandle_v2 / hipIpcOpenMemHandle (address: *mut u64, handle: RawHandle, flags: c_uint) shows(flags)
        |ledger, address, handle, flags| answer(address, ledger.ipc_open(&handle.0, flags));
    cuIpcCloseMemHandle / hipIpcCloseMemHandle (address: u64) shows(address)
        |ledger, address| ledger.ipc_close(address);
    cuStreamCreate / hipStreamCreateWithFlags (stream: *mut u64, flags: c_uint) shows(flags)
        |ledger, stream, flags| answer(stream, ledger.create_stream(flags));
    cuStreamSynchronize / hipStreamSynchronize (stream: u64) shows(stream)
        |ledger, stream| ledger.synchronize_stream(stream);
    cuStreamDestroy_v2 / hipStreamDestroy (stream: u64) shows(stream) |ledger, stream| ledger.destroy_stream(stream);
    cuMemcpyHtoDAsync_v2 / hipMemcpyHtoDAsync (target: u64, source: *const c_void, bytes: usize, stream: u64)
        shows(target, bytes, stream)
        |ledger, target, source, bytes, stream| {
            let host = source.expose_provenance() as u64;
            ledger.enqueue(stream, Job::In { target, host, bytes: bytes as u64 })
        };
    cuMemcpyDtoHAsync_v2 / hipMemcpyDtoHAsync (target: *mut c_void, source: u64, bytes: usize, stream: u64)
        shows(source, bytes, stream)
        |ledger, target, source, bytes, stream| {
            let host = target.expose_provenance() as u64;
            ledger.enqueue(stream, Job::Out { host, source, bytes: bytes as u64 })
        };
    cuMemcpyDtoDAsync_v2 / hipMemcpyDtoDAsync (target: u64, source: u64, bytes: usize, stream: u64)
        shows(target, source, bytes, stream)
        |ledger, target, source, bytes, stream| {
            ledger.enqueue(stream, Job::Across { target, source, bytes: bytes as u64 })
        };
    cuMemsetD8Async / hipMemsetD8Async (target: u64, value: u8, bytes: usize, stream: u64)
        shows(target, value, bytes, stream)
        |ledger, target, value, bytes, stream| {
            ledger.enqueue(stream, Job::Fill { target, value, bytes: bytes as u64 })
        };
    cuMemHostRegister_v2 / hipHostRegister (at: *mut c_void, bytes: usize, flags: c_uint) shows(bytes, flags)
        |ledger, at, bytes, flags| ledger.register(at.expose_provenance() as u64, bytes as u64, flags);
    cuMemHostGetDevicePointer_v2 / hipHostGetDevicePointer (address: *mut u64, at: *mut c_void, flags: c_uint)
        shows(flags)
        |ledger, address, at, flags| answer(address, ledger.window_address(at.addr() as u64, flags));
    cuMemHostUnregister / hipHostUnregister (at: *mut c_void) shows() |ledger, at| ledger.unregister(at.addr() as u64);
}

macro_rules! function {
    ($api:ident $name:ident ($($argument:ident: $type:ty),*) shows($($shown:expr),*) $body:expr) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the vendor's name")]
        unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            let body: &dyn Fn(&mut Ledger, $($type),*) -> Result<(), c_int> = &$body;
            let shown: Vec<String> = vec![$(format!("{:#x}", $shown)),*];
            call(Api::$api, stringify!($name), format_args!("{}", shown.join(", ")), &mut |ledger| {
                body(ledger, $($argument),*)
            })
        }
    };
}

function!(Cuda cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) shows(device)
    |ledger, context, device| answer(context, ledger.retain(device)));
function!(Cuda cuDevicePrimaryCtxRelease_v2(device: c_int) shows(device) |ledger, device| ledger.release_context(device));
function!(Cuda cuCtxGetCurrent(context: *mut usize) shows() |ledger, context| answer(context, ledger.context()));
function!(Cuda cuCtxSetCurrent(context: usize) shows(context) |ledger, context| ledger.set_context(context));
function!(Hip hipGetDevice(device: *mut c_int) shows() |ledger, device| answer(device, ledger.hip_device()));
function!(Hip hipSetDevice(device: c_int) shows(device) |ledger, device| ledger.set_hip_device(device));
function!(Hip hipGetDevicePropertiesR0600(properties: *mut u8, device: c_int) shows(device) |ledger, properties, device| {
    ledger.device(device)?;
    let architecture = c"gfx942:sramecc+:xnack-".to_bytes_with_nul();
    // SAFETY: the caller's struct has 1,472 bytes, of which the 256 from 1,160 are the architecture's name.
    unsafe {
        properties.write_bytes(0, 1472);
        properties.add(1160).copy_from_nonoverlapping(architecture.as_ptr(), architecture.len());
    }
    Ok(())
});

/// Neither is counted or logged: they do nothing.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the vendor's name")]
unsafe extern "C" fn cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int {
    let found = codes::text(code);
    // SAFETY: the caller's place for a pointer.
    unsafe { text.write(found.map_or(std::ptr::null(), CStr::as_ptr)) };
    if found.is_some() { 0 } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the vendor's name")]
unsafe extern "C" fn hipGetErrorString(code: c_int) -> *const c_char {
    codes::text(code).unwrap_or(c"unknown error").as_ptr()
}
