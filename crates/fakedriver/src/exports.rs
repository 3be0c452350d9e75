//! Functions under the names of both vendors. Each passes its arguments to the driver state and writes the result.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::call_log::call;
use crate::codes::{self, INVALID_VALUE};
use crate::state::{Api, DriverState, Prop, StreamOp};

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

/// Writes a result to the caller's pointer.
fn write_out<T>(out: *mut T, value: Result<T, c_int>) -> Result<(), c_int> {
    let value = value?;
    if out.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's pointer to memory for a `T`.
    unsafe { out.write(value) };
    Ok(())
}

fn prop_of(prop: *const RawProp) -> Result<Prop, c_int> {
    // SAFETY: the caller's pointer to a valid struct, or null.
    let prop = unsafe { prop.as_ref() }.ok_or(INVALID_VALUE)?;
    let RawProp { kind, handle_types, location_kind, device, win32, flags } = *prop;
    Ok(Prop { kind, handle_types, location_kind, device, rest: win32 | flags })
}

/// HIP before 7.1 takes a pointer to the descriptor, later versions and CUDA the descriptor itself.
fn descriptor(state: &DriverState, shareable: *mut c_void) -> Result<c_int, c_int> {
    if state.api == Api::Cuda || state.version() >= 70_100_000 {
        return c_int::try_from(shareable.addr()).map_err(|_| INVALID_VALUE);
    }
    // A small number is no address: a real driver would crash, this one returns an error.
    if shareable.addr() < 4096 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: a pointer to an int, as this version requires.
    Ok(unsafe { shareable.cast::<c_int>().read() })
}

macro_rules! functions {
    ($($cuda:ident / $hip:ident ($($argument:ident: $type:ty),*) logs($($logged:expr),*) $body:expr;)*) => {$(
        functions!(@one Cuda $cuda ($($argument: $type),*) ($($logged),*) $body);
        functions!(@one Hip $hip ($($argument: $type),*) ($($logged),*) $body);
    )*};
    (@one $api:ident $name:ident ($($argument:ident: $type:ty),*) ($($logged:expr),*) $body:expr) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments, reason = "the vendor's name and form")]
        unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            let logged: Vec<String> = vec![$(format!("{:#x}", $logged)),*];
            let body: &dyn Fn(&mut DriverState, $($type),*) -> Result<(), c_int> = &$body;
            call(Api::$api, stringify!($name), format_args!("{}", logged.join(", ")), &mut |state| {
                body(state, $($argument.clone()),*)
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
    cuInit / hipInit (flags: c_uint) logs(flags) |state, flags| state.init(flags);
    cuDriverGetVersion / hipRuntimeGetVersion (version: *mut c_int) logs()
        |state, version| write_out(version, Ok(state.version()));
    cuDeviceGetCount / hipGetDeviceCount (count: *mut c_int) logs()
        |state, count| { state.check_initialized()?; write_out(count, Ok(state.settings.devices)) };
    cuDeviceGet / hipDeviceGet (device: *mut c_int, ordinal: c_int) logs(ordinal)
        |state, device, ordinal| write_out(device, state.device(ordinal).map(|()| ordinal));
    cuDeviceGetName / hipDeviceGetName (name: *mut c_char, len: c_int, device: c_int) logs(len, device)
        |state, name, len, device| {
            state.device(device)?;
            let text = format!("Fake device {device}\0");
            if name.is_null() || (len as usize) < text.len() {
                return Err(INVALID_VALUE);
            }
            // SAFETY: the caller's buffer has `len` bytes.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), text.len()) };
            Ok(())
        };
    cuDeviceTotalMem_v2 / hipDeviceTotalMem (bytes: *mut usize, device: c_int) logs(device)
        |state, bytes, device| {
            write_out(bytes, state.device(device).map(|()| state.settings.memory as usize))
        };
    cuDeviceGetAttribute / hipDeviceGetAttribute (value: *mut c_int, attribute: c_int, device: c_int)
        logs(attribute, device)
        |state, value, attribute, device| write_out(value, state.attribute(attribute, device));
    cuDeviceCanAccessPeer / hipDeviceCanAccessPeer (can: *mut c_int, device: c_int, peer: c_int) logs(device, peer)
        |state, can, device, peer| {
            let both = state.device(device).and_then(|()| state.device(peer));
            write_out(can, both.map(|()| (device != peer && state.settings.can_access(device, peer)).into()))
        };
    cuPointerGetAttribute / hipPointerGetAttribute (data: *mut c_void, attribute: c_int, address: u64)
        logs(attribute, address)
        |state, data, attribute, address| {
            write_out(data.cast::<c_int>(), state.pointer_attribute(attribute, address))
        };
    cuCtxSynchronize / hipDeviceSynchronize () logs() |state| state.synchronize();
    cuMemGetAllocationGranularity / hipMemGetAllocationGranularity
        (granularity: *mut usize, prop: *const RawProp, option: c_int) logs(option)
        |state, granularity, prop, option| {
            write_out(granularity, state.granularity(&prop_of(prop)?, option).map(|bytes| bytes as usize))
        };
    cuMemCreate / hipMemCreate (handle: *mut u64, bytes: usize, prop: *const RawProp, flags: c_ulonglong)
        logs(bytes, flags)
        |state, handle, bytes, prop, flags| write_out(handle, state.create(bytes as u64, &prop_of(prop)?, flags));
    cuMemRelease / hipMemRelease (handle: u64) logs(handle) |state, handle| state.release(handle);
    cuMemAddressReserve / hipMemAddressReserve
        (address: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: c_ulonglong)
        logs(bytes, alignment, hint, flags)
        |state, address, bytes, alignment, hint, flags| {
            write_out(address, state.reserve(bytes as u64, alignment as u64, hint, flags))
        };
    cuMemAddressFree / hipMemAddressFree (address: u64, bytes: usize) logs(address, bytes)
        |state, address, bytes| state.free_addresses(address, bytes as u64);
    cuMemMap / hipMemMap (address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong)
        logs(address, bytes, offset, handle, flags)
        |state, address, bytes, offset, handle, flags| {
            state.map(address, bytes as u64, offset as u64, handle, flags)
        };
    cuMemUnmap / hipMemUnmap (address: u64, bytes: usize) logs(address, bytes)
        |state, address, bytes| state.unmap(address, bytes as u64);
    cuMemSetAccess / hipMemSetAccess (address: u64, bytes: usize, access: *const RawAccess, count: usize)
        logs(address, bytes, count)
        |state, address, bytes, access, count| {
            if access.is_null() {
                return Err(INVALID_VALUE);
            }
            // SAFETY: the caller's array of `count` structs.
            let access = unsafe { std::slice::from_raw_parts(access, count) };
            let access: Vec<_> = access.iter().map(|a| (a.kind, a.device, a.flags)).collect();
            state.set_access(address, bytes as u64, &access)
        };
    cuMemExportToShareableHandle / hipMemExportToShareableHandle
        (shareable: *mut c_void, handle: u64, kind: c_int, flags: c_ulonglong) logs(handle, kind, flags)
        |state, shareable, handle, kind, flags| {
            write_out(shareable.cast::<c_int>(), state.export(handle, kind, flags))
        };
    cuMemImportFromShareableHandle / hipMemImportFromShareableHandle
        (handle: *mut u64, shareable: *mut c_void, kind: c_int) logs(kind)
        |state, handle, shareable, kind| {
            let fd = descriptor(state, shareable)?;
            write_out(handle, state.import(fd, kind))
        };
    cuMemAlloc_v2 / hipMalloc (address: *mut u64, bytes: usize) logs(bytes)
        |state, address, bytes| write_out(address, state.alloc(bytes as u64));
    cuMemFree_v2 / hipFree (address: u64) logs(address) |state, address| state.free(address);
    cuIpcGetMemHandle / hipIpcGetMemHandle (handle: *mut RawHandle, address: u64) logs(address)
        |state, handle, address| write_out(handle, state.ipc_handle(address).map(RawHandle));
    cuIpcOpenMemHandle_v2 / hipIpcOpenMemHandle (address: *mut u64, handle: RawHandle, flags: c_uint) logs(flags)
        |state, address, handle, flags| write_out(address, state.ipc_open(&handle.0, flags));
    cuIpcCloseMemHandle / hipIpcCloseMemHandle (address: u64) logs(address)
        |state, address| state.ipc_close(address);
    cuStreamCreate / hipStreamCreateWithFlags (stream: *mut u64, flags: c_uint) logs(flags)
        |state, stream, flags| write_out(stream, state.create_stream(flags));
    cuStreamSynchronize / hipStreamSynchronize (stream: u64) logs(stream)
        |state, stream| state.synchronize_stream(stream);
    cuStreamDestroy_v2 / hipStreamDestroy (stream: u64) logs(stream) |state, stream| state.destroy_stream(stream);
    cuMemcpyHtoDAsync_v2 / hipMemcpyHtoDAsync (target: u64, source: *const c_void, bytes: usize, stream: u64)
        logs(target, bytes, stream)
        |state, target, source, bytes, stream| {
            let host = source.expose_provenance() as u64;
            state.enqueue(stream, StreamOp::HostToDevice { target, host, bytes: bytes as u64 })
        };
    cuMemcpyDtoHAsync_v2 / hipMemcpyDtoHAsync (target: *mut c_void, source: u64, bytes: usize, stream: u64)
        logs(source, bytes, stream)
        |state, target, source, bytes, stream| {
            let host = target.expose_provenance() as u64;
            state.enqueue(stream, StreamOp::DeviceToHost { host, source, bytes: bytes as u64 })
        };
    cuMemcpyDtoDAsync_v2 / hipMemcpyDtoDAsync (target: u64, source: u64, bytes: usize, stream: u64)
        logs(target, source, bytes, stream)
        |state, target, source, bytes, stream| {
            state.enqueue(stream, StreamOp::DeviceToDevice { target, source, bytes: bytes as u64 })
        };
    cuMemsetD8Async / hipMemsetD8Async (target: u64, value: u8, bytes: usize, stream: u64)
        logs(target, value, bytes, stream)
        |state, target, value, bytes, stream| {
            state.enqueue(stream, StreamOp::Fill { target, value, bytes: bytes as u64 })
        };
    cuMemHostRegister_v2 / hipHostRegister (at: *mut c_void, bytes: usize, flags: c_uint) logs(bytes, flags)
        |state, at, bytes, flags| state.register(at.expose_provenance() as u64, bytes as u64, flags);
    cuMemHostGetDevicePointer_v2 / hipHostGetDevicePointer (address: *mut u64, at: *mut c_void, flags: c_uint)
        logs(flags)
        |state, address, at, flags| write_out(address, state.device_address(at.addr() as u64, flags));
    cuMemHostUnregister / hipHostUnregister (at: *mut c_void) logs() |state, at| state.unregister(at.addr() as u64);
}

macro_rules! function {
    ($api:ident $name:ident ($($argument:ident: $type:ty),*) logs($($logged:expr),*) $body:expr) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the vendor's name")]
        unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            let body: &dyn Fn(&mut DriverState, $($type),*) -> Result<(), c_int> = &$body;
            let logged: Vec<String> = vec![$(format!("{:#x}", $logged)),*];
            call(Api::$api, stringify!($name), format_args!("{}", logged.join(", ")), &mut |state| {
                body(state, $($argument),*)
            })
        }
    };
}

function!(Cuda cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) logs(device)
    |state, context, device| write_out(context, state.retain(device)));
function!(Cuda cuDevicePrimaryCtxRelease_v2(device: c_int) logs(device) |state, device| state.release_context(device));
function!(Cuda cuCtxGetCurrent(context: *mut usize) logs() |state, context| write_out(context, state.context()));
function!(Cuda cuCtxSetCurrent(context: usize) logs(context) |state, context| state.set_context(context));
function!(Hip hipGetDevice(device: *mut c_int) logs() |state, device| write_out(device, state.hip_device()));
function!(Hip hipSetDevice(device: c_int) logs(device) |state, device| state.set_hip_device(device));
function!(Hip hipGetDevicePropertiesR0600(properties: *mut u8, device: c_int) logs(device) |state, properties, device| {
    state.device(device)?;
    let architecture = c"gfx942:sramecc+:xnack-".to_bytes_with_nul();
    // SAFETY: the caller's struct has 1,472 bytes, of which the 256 from 1,160 are the architecture's name.
    unsafe {
        properties.write_bytes(0, 1472);
        properties.add(1160).copy_from_nonoverlapping(architecture.as_ptr(), architecture.len());
    }
    Ok(())
});

/// Not counted or logged, as `hipGetErrorString`: they change nothing.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the vendor's name")]
unsafe extern "C" fn cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int {
    let found = codes::text(code);
    // SAFETY: the caller's memory for a pointer.
    unsafe { text.write(found.map_or(std::ptr::null(), CStr::as_ptr)) };
    if found.is_some() { 0 } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the vendor's name")]
unsafe extern "C" fn hipGetErrorString(code: c_int) -> *const c_char {
    codes::text(code).unwrap_or(c"unknown error").as_ptr()
}
