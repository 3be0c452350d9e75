//! The part of the drivers' interfaces that we call: structs, numbers and the table of function pointers.
//!
//! Owns no policy and no resource. Facts are those of `cuda.h` (CUDA 13.1) and `hip/hip_runtime_api.h` (ROCm 7.1), checked by
//! C programs printing `sizeof`, `offsetof` and the constants.
//!
//! Invariants:
//! - One column of types serves both vendors. Where `cuda.h` says `CUdeviceptr` or a handle of 64 bits HIP says `void*`;
//!   both are one register on every 64-bit target, and both enums are `int`s.
//! - Names are the versioned ones (`_v2`) to which the header's macros expand: the plain ones are other functions, of 32-bit
//!   devices.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem::offset_of;

use libloading::os::unix::Library;

use super::driver::{Driver, Vendor};
use super::error::DeviceError;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `hipMemAllocationTypePinned`
pub(super) const ALLOCATION_PINNED: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, `hipMemHandleTypePosixFileDescriptor`
pub(super) const HANDLE_POSIX_FD: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`, `hipMemLocationTypeDevice`
pub(super) const LOCATION_DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`, `hipMemAccessFlagsProtReadWrite`
pub(super) const ACCESS_READ_WRITE: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`, `hipMemAllocationGranularityRecommended`
pub(super) const GRANULARITY_RECOMMENDED: c_int = 1;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, `hipIpcMemLazyEnablePeerAccess`
pub(super) const IPC_LAZY_PEER_ACCESS: c_uint = 1;
/// `CU_STREAM_NON_BLOCKING`, `hipStreamNonBlocking`: does not wait for the legacy stream, nor the other way round.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE`, `hipHostRegisterPortable`: for all contexts of the process.
pub(super) const REGISTER_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`, `hipHostRegisterMapped`: devices get an address for it.
pub(super) const REGISTER_MAPPED: c_uint = 2;
/// `CU_MEMHOSTREGISTER_READ_ONLY`. Never for HIP: its header has the name and says that devices ignore it, and some of its
/// runtimes answer "invalid argument".
pub(super) const REGISTER_READ_ONLY: c_uint = 8;

/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`, `HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
pub(super) const POINTER_DEVICE_ORDINAL: c_int = 9;

/// From here on `hipMemImportFromShareableHandle` takes a descriptor by value, as CUDA does; before, its address.
pub(super) const HIP_FD_BY_VALUE: c_int = 70_100_000;

/// `CUmemLocation`, `hipMemLocation`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Location {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

/// `CUmemAllocationProp`, `hipMemAllocationProp`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocationProp {
    pub(super) kind: c_int,
    pub(super) handle_types: c_int,
    pub(super) location: Location,
    pub(super) win32_metadata: *mut c_void,
    /// `allocFlags`: compression, RDMA capability, usage; all off.
    pub(super) flags: [u8; 8],
}

/// `CUmemAccessDesc`, `hipMemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessDesc {
    pub(super) location: Location,
    pub(super) flags: c_int,
}

/// `CUipcMemHandle`, `hipIpcMemHandle_t`: passed by value, so its size is part of the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IpcHandle(pub(super) [u8; 64]);

const _: () = {
    assert!(size_of::<Location>() == 8 && offset_of!(Location, id) == 4);
    assert!(size_of::<AllocationProp>() == 32 && offset_of!(AllocationProp, handle_types) == 4);
    assert!(offset_of!(AllocationProp, location) == 8 && offset_of!(AllocationProp, win32_metadata) == 16);
    assert!(offset_of!(AllocationProp, flags) == 24);
    assert!(size_of::<AccessDesc>() == 12 && offset_of!(AccessDesc, flags) == 8);
    assert!(size_of::<IpcHandle>() == 64 && align_of::<IpcHandle>() == 1);
};

/// What a device can do; its number differs between the vendors.
#[derive(Clone, Copy, Debug)]
pub(super) enum Attribute {
    /// Virtual memory management: create, reserve, map.
    Vmm,
    /// Such memory can be exported as a descriptor.
    PosixFd,
    /// The link to the host carries atomics.
    HostAtomics,
    /// Memory of the host that this process may only read can be registered as such.
    ReadOnlyRegister,
    ComputeMajor,
    ComputeMinor,
}

impl Attribute {
    /// None: no device of this vendor can do it.
    ///
    /// HIP has no attribute for descriptors: on Linux it has them wherever it has virtual memory management.
    pub(super) fn number(self, vendor: Vendor) -> Option<c_int> {
        let [cuda, hip] = match self {
            Attribute::ReadOnlyRegister => return vendor.pick(Some(113), None),
            Attribute::Vmm => [102, 89],
            Attribute::PosixFd => [103, 89],
            Attribute::HostAtomics => [86, 15],
            Attribute::ComputeMajor => [75, 23],
            Attribute::ComputeMinor => [76, 61],
        };
        Some(vendor.pick(cuda, hip))
    }
}

/// The address of a function.
fn address(library: &Library, name: &'static str) -> Result<*mut c_void, &'static str> {
    // SAFETY: only the address is taken; whoever calls it vouches for its type.
    unsafe { library.get::<*mut c_void>(name.as_bytes()) }.map(|symbol| symbol.into_raw()).map_err(|_| name)
}

macro_rules! calls {
    ($($(#[$doc:meta])* $field:ident: $cuda:literal / $hip:literal ($($argument:ident: $type:ty),*);)*) => {
        /// Functions that both vendors have.
        pub(super) struct Calls {
            $($field: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        impl Calls {
            /// # Safety
            /// The library is the driver of this vendor, and stays loaded.
            pub(super) unsafe fn resolve(library: &Library, vendor: Vendor) -> Result<Calls, &'static str> {
                // SAFETY: the types are those of the vendors' headers, says the head of this file.
                Ok(Calls { $($field: unsafe {
                    std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> c_int>(
                        address(library, vendor.pick($cuda, $hip))?,
                    )
                },)* })
            }
        }

        impl Driver {
            $($(#[$doc])*
            ///
            /// # Safety
            /// Pointers are valid for what the call reads and writes, addresses and handles are the driver's.
            #[inline(never)]
            pub(super) unsafe fn $field(self, $($argument: $type),*) -> Result<(), DeviceError> {
                // SAFETY: says the caller.
                let code = unsafe { (self.calls().$field)($($argument),*) };
                self.check(self.vendor().pick($cuda, $hip), code)
            })*
        }
    };
}

calls! {
    /// Must come first in a process.
    init: "cuInit" / "hipInit" (flags: c_uint);
    /// CUDA: 1000 × major + 10 × minor. HIP: 10,000,000 × major + 100,000 × minor + patch.
    get_version: "cuDriverGetVersion" / "hipRuntimeGetVersion" (version: *mut c_int);
    /// How many devices are visible.
    device_count: "cuDeviceGetCount" / "hipGetDeviceCount" (count: *mut c_int);
    /// From an ordinal to a device.
    device_get: "cuDeviceGet" / "hipDeviceGet" (device: *mut c_int, ordinal: c_int);
    /// Its name, ended by a zero.
    device_name: "cuDeviceGetName" / "hipDeviceGetName" (name: *mut c_char, len: c_int, device: c_int);
    /// Bytes of its memory.
    device_memory: "cuDeviceTotalMem_v2" / "hipDeviceTotalMem" (bytes: *mut usize, device: c_int);
    /// An [`Attribute`]'s value.
    device_attribute: "cuDeviceGetAttribute" / "hipDeviceGetAttribute" (value: *mut c_int, attribute: c_int, device: c_int);
    /// Whether a device can access another's memory.
    can_access_peer: "cuDeviceCanAccessPeer" / "hipDeviceCanAccessPeer" (can: *mut c_int, device: c_int, peer: c_int);
    /// What is known of an address: of `attribute` [`POINTER_DEVICE_ORDINAL`], an `int`.
    pointer_attribute: "cuPointerGetAttribute" / "hipPointerGetAttribute" (data: *mut c_void, attribute: c_int, address: u64);
    /// Waits for what the current device does.
    synchronize: "cuCtxSynchronize" / "hipDeviceSynchronize" ();
    /// Of what lengths and addresses must be multiples.
    granularity: "cuMemGetAllocationGranularity" / "hipMemGetAllocationGranularity"
        (granularity: *mut usize, prop: *const AllocationProp, option: c_int);
    /// Memory without an address.
    mem_create: "cuMemCreate" / "hipMemCreate"
        (handle: *mut u64, bytes: usize, prop: *const AllocationProp, flags: c_ulonglong);
    /// Ends a handle; the memory stays while it is mapped or shared.
    mem_release: "cuMemRelease" / "hipMemRelease" (handle: u64);
    /// Addresses without memory.
    address_reserve: "cuMemAddressReserve" / "hipMemAddressReserve"
        (address: *mut u64, bytes: usize, alignment: usize, wish: u64, flags: c_ulonglong);
    /// Ends a reservation under which nothing is mapped.
    address_free: "cuMemAddressFree" / "hipMemAddressFree" (address: u64, bytes: usize);
    /// Memory to addresses, accessible to nobody yet.
    mem_map: "cuMemMap" / "hipMemMap"
        (address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong);
    /// The whole of a mapping.
    mem_unmap: "cuMemUnmap" / "hipMemUnmap" (address: u64, bytes: usize);
    /// Which devices may read and write a mapping.
    set_access: "cuMemSetAccess" / "hipMemSetAccess"
        (address: u64, bytes: usize, access: *const AccessDesc, count: usize);
    /// A descriptor for a handle; `shareable` points to an `int`.
    export: "cuMemExportToShareableHandle" / "hipMemExportToShareableHandle"
        (shareable: *mut c_void, handle: u64, kind: c_int, flags: c_ulonglong);
    /// A handle for a descriptor, which is passed by value: see [`HIP_FD_BY_VALUE`].
    import: "cuMemImportFromShareableHandle" / "hipMemImportFromShareableHandle"
        (handle: *mut u64, shareable: *mut c_void, kind: c_int);
    /// Memory with an address, the old way.
    mem_alloc: "cuMemAlloc_v2" / "hipMalloc" (address: *mut u64, bytes: usize);
    /// Gives it back.
    mem_free: "cuMemFree_v2" / "hipFree" (address: u64);
    /// A handle by which another process can open such memory.
    ipc_get: "cuIpcGetMemHandle" / "hipIpcGetMemHandle" (handle: *mut IpcHandle, address: u64);
    /// Opens it there.
    ipc_open: "cuIpcOpenMemHandle_v2" / "hipIpcOpenMemHandle" (address: *mut u64, handle: IpcHandle, flags: c_uint);
    /// Closes it there.
    ipc_close: "cuIpcCloseMemHandle" / "hipIpcCloseMemHandle" (address: u64);
    /// Work that is done in order, beside other streams' work. A stream is an address that only the driver looks at.
    stream_create: "cuStreamCreate" / "hipStreamCreateWithFlags" (stream: *mut u64, flags: c_uint);
    /// Waits for what is in it.
    stream_synchronize: "cuStreamSynchronize" / "hipStreamSynchronize" (stream: u64);
    /// Ends it when its work is done.
    stream_destroy: "cuStreamDestroy_v2" / "hipStreamDestroy" (stream: u64);
    /// Host to device.
    copy_in: "cuMemcpyHtoDAsync_v2" / "hipMemcpyHtoDAsync"
        (target: u64, source: *const c_void, bytes: usize, stream: u64);
    /// Device to host.
    copy_out: "cuMemcpyDtoHAsync_v2" / "hipMemcpyDtoHAsync"
        (target: *mut c_void, source: u64, bytes: usize, stream: u64);
    /// Device to device, or to what a device sees of the host.
    copy_across: "cuMemcpyDtoDAsync_v2" / "hipMemcpyDtoDAsync"
        (target: u64, source: u64, bytes: usize, stream: u64);
    /// Fills with one byte.
    fill: "cuMemsetD8Async" / "hipMemsetD8Async" (target: u64, value: u8, bytes: usize, stream: u64);
    /// Pins memory of the host and makes it known to devices.
    host_register: "cuMemHostRegister_v2" / "hipHostRegister" (at: *mut c_void, bytes: usize, flags: c_uint);
    /// What devices call such memory.
    host_address: "cuMemHostGetDevicePointer_v2" / "hipHostGetDevicePointer"
        (address: *mut u64, at: *mut c_void, flags: c_uint);
    /// Ends it. Takes where it begins.
    host_unregister: "cuMemHostUnregister" / "hipHostUnregister" (at: *mut c_void);
}

/// Functions that have no counterpart, or another form.
pub(super) enum OwnCalls {
    Cuda {
        error_string: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
        retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
        release: unsafe extern "C" fn(c_int) -> c_int,
        get_current: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
        set_current: unsafe extern "C" fn(*mut c_void) -> c_int,
    },
    Hip {
        error_string: unsafe extern "C" fn(c_int) -> *const c_char,
        get_device: unsafe extern "C" fn(*mut c_int) -> c_int,
        set_device: unsafe extern "C" fn(c_int) -> c_int,
        /// `hipDeviceProp_tR0600` has 1,472 bytes; the name of the architecture is at 1,160.
        properties: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    },
}

impl OwnCalls {
    /// # Safety
    /// As [`Calls::resolve`].
    pub(super) unsafe fn resolve(library: &Library, vendor: Vendor) -> Result<OwnCalls, &'static str> {
        macro_rules! function {
            ($name:literal, $type:ty) => {
                // SAFETY: the type is that of the vendor's header.
                unsafe { std::mem::transmute::<*mut c_void, $type>(address(library, $name)?) }
            };
        }
        type Place<T> = unsafe extern "C" fn(*mut T) -> c_int;
        Ok(match vendor {
            Vendor::Cuda => OwnCalls::Cuda {
                error_string: function!(
                    "cuGetErrorString",
                    unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int
                ),
                retain: function!(
                    "cuDevicePrimaryCtxRetain",
                    unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int
                ),
                release: function!("cuDevicePrimaryCtxRelease_v2", unsafe extern "C" fn(c_int) -> c_int),
                get_current: function!("cuCtxGetCurrent", Place<*mut c_void>),
                set_current: function!("cuCtxSetCurrent", Place<c_void>),
            },
            Vendor::Hip => OwnCalls::Hip {
                error_string: function!("hipGetErrorString", unsafe extern "C" fn(c_int) -> *const c_char),
                get_device: function!("hipGetDevice", Place<c_int>),
                set_device: function!("hipSetDevice", unsafe extern "C" fn(c_int) -> c_int),
                properties: function!(
                    "hipGetDevicePropertiesR0600",
                    unsafe extern "C" fn(*mut c_void, c_int) -> c_int
                ),
            },
        })
    }
}
