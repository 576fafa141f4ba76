/*
 * A libcuda.so.1 for machines without a GPU driver: NIXL's LIBFABRIC plugin links the library, and asks it
 * whether memory is a GPU's. Every function says that there is no device.
 */
enum { NO_DEVICE = 100 };

int cuInit(unsigned flags) { (void)flags; return NO_DEVICE; }
int cuDriverGetVersion(int *version) { *version = 0; return NO_DEVICE; }
int cuDeviceGetCount(int *count) { *count = 0; return NO_DEVICE; }
int cuCtxSetCurrent(void *context) { (void)context; return NO_DEVICE; }

int cuDeviceGetPCIBusId(char *id, int len, int device) {
    (void)id; (void)len; (void)device;
    return NO_DEVICE;
}

int cuPointerGetAttributes(unsigned count, void *which, void **values, unsigned long long address) {
    (void)count; (void)which; (void)values; (void)address;
    return NO_DEVICE;
}

int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    (void)name; (void)version; (void)flags;
    *function = 0;
    return NO_DEVICE;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, void *found) {
    (void)found;
    return cuGetProcAddress(name, function, version, flags);
}
