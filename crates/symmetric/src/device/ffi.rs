//! Used part of the drivers' interfaces: structs, constants and the table of function pointers.
//!
//! Owns no policy and no resource. Values are those of `cuda.h` (CUDA 13.1) and `hip/hip_runtime_api.h` (ROCm 7.1),
//! checked with C programs that print `sizeof`, `offsetof` and the constants.
//!
//! Invariants:
//! - One set of types serves both vendors. Where `cuda.h` has `CUdeviceptr` or a 64-bit handle HIP has `void*`; both
//!   are one register on every 64-bit target, and both enums are `int`s.
//! - Names are the versioned ones (`_v2`) to which the header's macros expand: the plain ones are other functions, of
//!   32-bit devices.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem::offset_of;

use libloading::os::unix::Library;

use super::error::DeviceError;
use super::vendor::Vendor;

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
/// `CU_STREAM_NON_BLOCKING`, `hipStreamNonBlocking`: independent of the legacy stream in both directions.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE`, `hipHostRegisterPortable`: for all contexts of the process.
pub(super) const REGISTER_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`, `hipHostRegisterMapped`: maps it into the address space of devices.
pub(super) const REGISTER_MAPPED: c_uint = 2;
/// `CU_MEMHOSTREGISTER_READ_ONLY`. Never for HIP: its header has the name with the comment that devices ignore it,
/// and some of its runtimes return "invalid argument".
pub(super) const REGISTER_READ_ONLY: c_uint = 8;

/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`, `HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
pub(super) const POINTER_DEVICE_ORDINAL: c_int = 9;

/// From this version on `hipMemImportFromShareableHandle` takes a descriptor by value, as CUDA does; before, its
/// address.
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

/// `CUipcMemHandle`, `hipIpcMemHandle_t`: passed by value, so its size is part of the ABI.
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

/// Capability of a device; its number differs between the vendors.
#[derive(Clone, Copy, Debug)]
pub(super) enum Attribute {
    /// Virtual memory management: create, reserve, map.
    Vmm,
    /// Such memory can be exported as a descriptor.
    PosixFd,
    /// The link to the host carries atomics.
    HostAtomics,
    /// Host memory that this process maps read-only can be registered.
    ReadOnlyRegister,
    ComputeMajor,
    ComputeMinor,
}

impl Attribute {
    /// Returns the attribute's number, or `None` if no device of this vendor has the capability.
    ///
    /// HIP has no attribute for descriptors: on Linux it supports them together with virtual memory management.
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

/// Returns the address of a function.
fn address(library: &Library, name: &'static str) -> Result<*mut c_void, &'static str> {
    // SAFETY: only the address is taken; the caller vouches for its type.
    unsafe { library.get::<*mut c_void>(name.as_bytes()) }.map(|symbol| symbol.into_raw()).map_err(|_| name)
}

macro_rules! driver_api {
    ($($(#[$doc:meta])* $field:ident: $cuda:literal / $hip:literal ($($argument:ident: $type:ty),*);)*) => {
        /// Functions that both vendors have.
        pub(super) struct DriverApi {
            $($field: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        impl DriverApi {
            /// # Safety
            /// The library is the driver of this vendor, and remains loaded.
            pub(super) unsafe fn resolve(library: &Library, vendor: Vendor) -> Result<DriverApi, &'static str> {
                // SAFETY: the types are those of the vendors' headers, as the header of this file states.
                Ok(DriverApi { $($field: unsafe {
                    std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> c_int>(
                        address(library, vendor.pick($cuda, $hip))?,
                    )
                },)* })
            }
        }

        /// Calls of a loaded driver.
        pub(super) trait DriverCalls: Copy {
            /// Returns its functions.
            fn api(self) -> &'static DriverApi;

            /// Converts the code of a call, which has a name for each vendor, to a result.
            fn result(self, cuda: &'static str, hip: &'static str, code: c_int) -> Result<(), DeviceError>;

            $($(#[$doc])*
            ///
            /// # Safety
            /// Pointers are valid for the reads and writes of the call; addresses and handles belong to the driver.
            #[inline(never)]
            unsafe fn $field(self, $($argument: $type),*) -> Result<(), DeviceError> {
                // SAFETY: guaranteed by the caller.
                let code = unsafe { (self.api().$field)($($argument),*) };
                self.result($cuda, $hip, code)
            })*
        }
    };
}

driver_api! {
    /// Initializes the driver. Must be the first call of a process.
    init: "cuInit" / "hipInit" (flags: c_uint);
    /// Returns the version. CUDA: 1000 × major + 10 × minor. HIP: 10,000,000 × major + 100,000 × minor + patch.
    get_version: "cuDriverGetVersion" / "hipRuntimeGetVersion" (version: *mut c_int);
    /// Returns the number of visible devices.
    device_count: "cuDeviceGetCount" / "hipGetDeviceCount" (count: *mut c_int);
    /// Returns the device of an ordinal.
    device_get: "cuDeviceGet" / "hipDeviceGet" (device: *mut c_int, ordinal: c_int);
    /// Returns the name of a device, terminated by a zero.
    device_name: "cuDeviceGetName" / "hipDeviceGetName" (name: *mut c_char, len: c_int, device: c_int);
    /// Returns the size of a device's memory in bytes.
    device_memory: "cuDeviceTotalMem_v2" / "hipDeviceTotalMem" (bytes: *mut usize, device: c_int);
    /// Returns the value of an [`Attribute`].
    device_attribute: "cuDeviceGetAttribute" / "hipDeviceGetAttribute" (value: *mut c_int, attribute: c_int, device: c_int);
    /// Returns whether a device can access another's memory.
    can_access_peer: "cuDeviceCanAccessPeer" / "hipDeviceCanAccessPeer" (can: *mut c_int, device: c_int, peer: c_int);
    /// Returns an attribute of an address: for `attribute` [`POINTER_DEVICE_ORDINAL`], an `int`.
    pointer_attribute: "cuPointerGetAttribute" / "hipPointerGetAttribute" (data: *mut c_void, attribute: c_int, address: u64);
    /// Waits for all work of the current device.
    synchronize: "cuCtxSynchronize" / "hipDeviceSynchronize" ();
    /// Returns the number of which lengths and addresses must be multiples.
    granularity: "cuMemGetAllocationGranularity" / "hipMemGetAllocationGranularity"
        (granularity: *mut usize, prop: *const AllocationProp, option: c_int);
    /// Allocates memory without an address.
    mem_create: "cuMemCreate" / "hipMemCreate"
        (handle: *mut u64, bytes: usize, prop: *const AllocationProp, flags: c_ulonglong);
    /// Releases a handle; the memory remains while it is mapped or shared.
    mem_release: "cuMemRelease" / "hipMemRelease" (handle: u64);
    /// Reserves addresses without memory.
    address_reserve: "cuMemAddressReserve" / "hipMemAddressReserve"
        (address: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: c_ulonglong);
    /// Frees a reservation in which nothing is mapped.
    address_free: "cuMemAddressFree" / "hipMemAddressFree" (address: u64, bytes: usize);
    /// Maps memory to addresses, without access for any device.
    mem_map: "cuMemMap" / "hipMemMap"
        (address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong);
    /// Unmaps a whole mapping.
    mem_unmap: "cuMemUnmap" / "hipMemUnmap" (address: u64, bytes: usize);
    /// Sets the devices that may read and write a mapping.
    set_access: "cuMemSetAccess" / "hipMemSetAccess"
        (address: u64, bytes: usize, access: *const AccessDesc, count: usize);
    /// Exports a handle as a descriptor; `shareable` points to an `int`.
    export: "cuMemExportToShareableHandle" / "hipMemExportToShareableHandle"
        (shareable: *mut c_void, handle: u64, kind: c_int, flags: c_ulonglong);
    /// Imports a descriptor, which is passed by value: see [`HIP_FD_BY_VALUE`].
    import: "cuMemImportFromShareableHandle" / "hipMemImportFromShareableHandle"
        (handle: *mut u64, shareable: *mut c_void, kind: c_int);
    /// Allocates memory with an address, without virtual memory management.
    mem_alloc: "cuMemAlloc_v2" / "hipMalloc" (address: *mut u64, bytes: usize);
    /// Frees such memory.
    mem_free: "cuMemFree_v2" / "hipFree" (address: u64);
    /// Returns a handle with which another process can open such memory.
    ipc_get: "cuIpcGetMemHandle" / "hipIpcGetMemHandle" (handle: *mut IpcHandle, address: u64);
    /// Opens a handle.
    ipc_open: "cuIpcOpenMemHandle_v2" / "hipIpcOpenMemHandle" (address: *mut u64, handle: IpcHandle, flags: c_uint);
    /// Closes opened memory.
    ipc_close: "cuIpcCloseMemHandle" / "hipIpcCloseMemHandle" (address: u64);
    /// Creates a stream, which runs its work in order, independently of other streams. It is an address that only the
    /// driver dereferences.
    stream_create: "cuStreamCreate" / "hipStreamCreateWithFlags" (stream: *mut u64, flags: c_uint);
    /// Waits for the work of a stream.
    stream_synchronize: "cuStreamSynchronize" / "hipStreamSynchronize" (stream: u64);
    /// Destroys a stream when its work is done.
    stream_destroy: "cuStreamDestroy_v2" / "hipStreamDestroy" (stream: u64);
    /// Copies from host to device.
    copy_in: "cuMemcpyHtoDAsync_v2" / "hipMemcpyHtoDAsync"
        (target: u64, source: *const c_void, bytes: usize, stream: u64);
    /// Copies from device to host.
    copy_out: "cuMemcpyDtoHAsync_v2" / "hipMemcpyDtoHAsync"
        (target: *mut c_void, source: u64, bytes: usize, stream: u64);
    /// Copies from device to device, or to registered host memory.
    copy_across: "cuMemcpyDtoDAsync_v2" / "hipMemcpyDtoDAsync"
        (target: u64, source: u64, bytes: usize, stream: u64);
    /// Fills memory with one byte value.
    fill: "cuMemsetD8Async" / "hipMemsetD8Async" (target: u64, value: u8, bytes: usize, stream: u64);
    /// Pins host memory and registers it with devices.
    host_register: "cuMemHostRegister_v2" / "hipHostRegister" (at: *mut c_void, bytes: usize, flags: c_uint);
    /// Returns the device address of registered memory.
    host_address: "cuMemHostGetDevicePointer_v2" / "hipHostGetDevicePointer"
        (address: *mut u64, at: *mut c_void, flags: c_uint);
    /// Unregisters memory, by its start address.
    host_unregister: "cuMemHostUnregister" / "hipHostUnregister" (at: *mut c_void);
}

/// Functions without a counterpart, or with another signature.
pub(super) enum VendorApi {
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

impl VendorApi {
    /// # Safety
    /// As [`DriverApi::resolve`].
    pub(super) unsafe fn resolve(library: &Library, vendor: Vendor) -> Result<VendorApi, &'static str> {
        macro_rules! function {
            ($name:literal, $type:ty) => {
                // SAFETY: the type is that of the vendor's header.
                unsafe { std::mem::transmute::<*mut c_void, $type>(address(library, $name)?) }
            };
        }
        type OutParamFn<T> = unsafe extern "C" fn(*mut T) -> c_int;
        Ok(match vendor {
            Vendor::Cuda => VendorApi::Cuda {
                error_string: function!(
                    "cuGetErrorString",
                    unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int
                ),
                retain: function!(
                    "cuDevicePrimaryCtxRetain",
                    unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int
                ),
                release: function!("cuDevicePrimaryCtxRelease_v2", unsafe extern "C" fn(c_int) -> c_int),
                get_current: function!("cuCtxGetCurrent", OutParamFn<*mut c_void>),
                set_current: function!("cuCtxSetCurrent", OutParamFn<c_void>),
            },
            Vendor::Hip => VendorApi::Hip {
                error_string: function!("hipGetErrorString", unsafe extern "C" fn(c_int) -> *const c_char),
                get_device: function!("hipGetDevice", OutParamFn<c_int>),
                set_device: function!("hipSetDevice", unsafe extern "C" fn(c_int) -> c_int),
                properties: function!(
                    "hipGetDevicePropertiesR0600",
                    unsafe extern "C" fn(*mut c_void, c_int) -> c_int
                ),
            },
        })
    }
}
