// RUN: %opt %s -p call-libm | %filecheck %s
// RUN: %opt %s -p call-libm --print-op-generic | %iree-opt - > /dev/null

// One call for each lane; what IREE does well stays. Functions on tensors are left alone.

// CHECK-LABEL: func.func @loop
func.func @loop(%x: memref<4xf64>, %s: memref<4xf32>) {
  %zero = arith.constant 0 : index
  %v = vector.load %x[%zero] : memref<4xf64>, vector<2xf64>

  // CHECK: [[A:%.+]] = vector.extract %v[0] : f64 from vector<2xf64>
  // CHECK-NEXT: [[FA:%.+]] = func.call @erf([[A]]) : (f64) -> f64
  // CHECK-NEXT: [[B:%.+]] = vector.extract %v[1] : f64 from vector<2xf64>
  // CHECK-NEXT: [[FB:%.+]] = func.call @erf([[B]]) : (f64) -> f64
  // CHECK-NEXT: %e = "vector.from_elements"([[FA]], [[FB]]) : (f64, f64) -> vector<2xf64>
  %e = math.erf %v : vector<2xf64>

  // CHECK-COUNT-2: func.call @pow({{.*}}, {{.*}}) : (f64, f64) -> f64
  %p = math.powf %e, %v : vector<2xf64>
  // CHECK: math.exp {{.*}} : vector<2xf64>
  %r = math.exp %p : vector<2xf64>
  vector.store %r, %x[%zero] : memref<4xf64>, vector<2xf64>

  %a = memref.load %s[%zero] : memref<4xf32>
  // CHECK: func.call @atan2f({{.*}}, {{.*}}) : (f32, f32) -> f32
  %t = math.atan2 %a, %a : f32
  // CHECK: math.erf {{.*}} : f32
  %u = math.erf %t : f32
  memref.store %u, %s[%zero] : memref<4xf32>
  func.return
}

// CHECK-LABEL: func.func @host
func.func @host(%x: tensor<f64>) -> f64 {
  %a = tensor.extract %x[] : tensor<f64>
  // CHECK: math.sinh
  %b = math.sinh %a : f64
  func.return %b : f64
}

// CHECK: func.func private @erf(f64) -> f64
// CHECK-NEXT: func.func private @pow(f64, f64) -> f64
// CHECK-NEXT: func.func private @atan2f(f32, f32) -> f32
// CHECK-NOT: @sinh
