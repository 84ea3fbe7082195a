//! Copies between host and GPU that run while the GPU computes: they use page-locked memory and their own
//! streams, and events order them with the computation. Owns the streams and the page-locked memory, which is
//! reused: locking pages takes longer than copying them.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaStream, DeviceRepr, DriverError, PinnedHostSlice,
};
use candle_core::cuda_backend::{CudaDevice, CudaStorage, CudaStorageSlice, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{Device, Result, Storage, Tensor, bail};

/// The smallest capacity of a page-locked buffer, in numbers of 4 bytes.
const MIN_CAPACITY: usize = 1 << 14;

/// The streams and the page-locked memory for the copies of one GPU.
pub struct Copies {
    device: CudaDevice,
    to_device: Arc<CudaStream>,
    to_host: Arc<CudaStream>,
    /// Page-locked buffers that no copy uses: for uploads, and for results.
    free_uploads: Vec<PinnedHostSlice<u32>>,
    free_results: Vec<PinnedHostSlice<f32>>,
}

/// An uploaded array. It must exist until the computation that reads it is done, which Rust's lifetimes do not show;
/// [`Copies::fetch`] takes ownership of it.
pub struct HostToDevice {
    /// The array on the device, one-dimensional.
    pub tensor: Tensor,
    buffer: PinnedHostSlice<u32>,
}

/// A copy to the host that may still be running.
pub struct DeviceToHost {
    /// What the copy reads and writes. It is kept until the copy is done.
    parts: Option<(HostToDevice, Tensor, PinnedHostSlice<f32>)>,
    done: CudaEvent,
}

impl Copies {
    /// Streams for copies to and from `device`.
    ///
    /// # Errors
    /// `device` is no GPU, or its driver cannot create a stream.
    pub fn new(device: &Device) -> Result<Self> {
        let device = device.as_cuda_device()?.clone();
        let context = device.cuda_stream().context().clone();
        let (to_device, to_host) = (context.new_stream().w()?, context.new_stream().w()?);
        Ok(Self { device, to_device, to_host, free_uploads: Vec::new(), free_results: Vec::new() })
    }

    /// Copies `numbers` to the device. Work that is submitted afterwards can read them.
    ///
    /// # Errors
    /// The driver's error.
    pub fn upload(&mut self, numbers: &[u32]) -> Result<HostToDevice> {
        let mut buffer = buffer(&mut self.free_uploads, numbers.len(), &self.to_device).w()?;
        let source = &mut buffer.as_mut_slice().w()?[..numbers.len()];
        source.copy_from_slice(numbers);
        let copy = self.to_device.clone_htod(source).w()?;
        let copied = self.to_device.record_event(None).w()?;
        self.device.cuda_stream().wait(&copied).w()?;
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(copy, self.device.clone()));
        let tensor = Tensor::from_storage(storage, numbers.len(), BackpropOp::none(), false);
        Ok(HostToDevice { tensor, buffer })
    }

    /// Copies `computed`, a whole f32 tensor that was computed from `uploaded`, to the host once the device has
    /// computed it.
    ///
    /// # Errors
    /// The error of the computation's submission, or the driver's. Then nothing is running any more.
    pub fn fetch(&mut self, uploaded: HostToDevice, computed: Result<Tensor>) -> Result<DeviceToHost> {
        let copied = computed.and_then(|computed| {
            let (buffer, done) = self.copy_out(&computed)?;
            Ok((computed, buffer, done))
        });
        match copied {
            Ok((computed, buffer, done)) => {
                Ok(DeviceToHost { parts: Some((uploaded, computed, buffer)), done })
            }
            Err(error) => {
                // The device may still read memory that is freed now. A fault is reported by the next call.
                let _ = self.device.cuda_stream().synchronize();
                let _ = self.to_host.synchronize();
                Err(error)
            }
        }
    }

    fn copy_out(&mut self, computed: &Tensor) -> Result<(PinnedHostSlice<f32>, CudaEvent)> {
        let mut buffer = buffer(&mut self.free_results, computed.elem_count(), &self.to_host).w()?;
        let ready = self.device.cuda_stream().record_event(None).w()?;
        self.to_host.wait(&ready).w()?;
        {
            let (storage, layout) = computed.storage_and_layout();
            let (Storage::Cuda(storage), Some((0, end))) = (&*storage, layout.contiguous_offsets()) else {
                bail!("only a whole tensor on a GPU can be fetched, and this one is {layout:?}");
            };
            let CudaStorageSlice::F32(numbers) = &storage.slice else {
                bail!("only f32 can be fetched from a GPU, not {:?}", computed.dtype());
            };
            let target = &mut buffer.as_mut_slice().w()?[..end];
            self.to_host.memcpy_dtoh(&numbers.slice(..end), target).w()?;
        }
        // The waiting thread sleeps instead of spinning: a core of the host is worth more than a few microseconds.
        let done = self.to_host.record_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC)).w()?;
        Ok((buffer, done))
    }

    /// Waits for a copy to the host.
    ///
    /// # Errors
    /// The driver's error, which may come from earlier work.
    pub fn wait(&mut self, mut fetched: DeviceToHost) -> Result<Vec<f32>> {
        fetched.done.synchronize().w()?;
        let Some((uploaded, computed, buffer)) = fetched.parts.take() else { return Ok(Vec::new()) };
        let numbers = buffer.as_slice().w()?[..computed.elem_count()].to_vec();
        self.free_uploads.push(uploaded.buffer);
        self.free_results.push(buffer);
        Ok(numbers)
    }
}

impl Drop for DeviceToHost {
    fn drop(&mut self) {
        // An error is ignored: after a device fault there is nothing to wait for, and the process ends.
        let _ = self.done.synchronize();
    }
}

/// A page-locked buffer for `count` numbers.
fn buffer<T: DeviceRepr>(
    free: &mut Vec<PinnedHostSlice<T>>,
    count: usize,
    stream: &CudaStream,
) -> std::result::Result<PinnedHostSlice<T>, DriverError> {
    match free.pop() {
        Some(buffer) if buffer.len() >= count => Ok(buffer),
        // A buffer that is too small is freed.
        _ => lock_pages(stream, count.max(MIN_CAPACITY).next_power_of_two()),
    }
}

#[expect(unsafe_code, reason = "page-locked memory can only be allocated uninitialised")]
fn lock_pages<T: DeviceRepr>(
    stream: &CudaStream,
    count: usize,
) -> std::result::Result<PinnedHostSlice<T>, DriverError> {
    // SAFETY: any bits are a valid number of the two types used here, and each is written before it is read.
    // Not write-combined, since the CPU reads the results.
    unsafe { stream.context().alloc_pinned_with_flags(count, 0) }
}
